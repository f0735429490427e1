"""What a run looks like: its folder read back, its report, its page, its drawings."""
