"""How processes talk: frames on pipes between parent and child, messages on ZMQ between servers."""
