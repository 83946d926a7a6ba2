"""`kiloword audit`: pairs that do not match, duplicates, generic captions, wrong labels; a keep-list."""
