"""The command line. One file a verb; a verb is absent until it works."""
