"""Tables, plots, pages and summaries made from result folders and shards."""
