"""Output for people: progress, tables, timelines and the HTML report."""
