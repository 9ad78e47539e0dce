"""From credited groups to a batch manifest. Pure: sizes and refs, no tokens."""
