"""Models of a hub, by the name ``hf:owner/repo[/file]``: found, fetched with resume and checksum, and kept."""
