"""How processes talk: frames on pipes between parent and child, ZMQ messages between servers."""
