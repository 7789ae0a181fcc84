"""What a person sees: progress, tables, timelines."""
