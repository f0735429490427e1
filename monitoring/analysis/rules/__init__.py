"""Rules: each looks at a window of steps for one cause of lost time, and names it with its remedy."""
