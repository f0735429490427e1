"""Starting ranks on this host, supervising them, and ending them."""
