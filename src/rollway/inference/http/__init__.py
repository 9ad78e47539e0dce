"""An HTTP/1.1 client made for replies of many megabytes."""
