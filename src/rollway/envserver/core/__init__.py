"""The env server's decisions. Pure: messages in, messages out."""
