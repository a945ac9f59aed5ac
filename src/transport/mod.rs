//! One-sided transfers on registered regions.
