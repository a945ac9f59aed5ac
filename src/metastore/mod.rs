//! The metadata store: compare-and-swap over small records.
