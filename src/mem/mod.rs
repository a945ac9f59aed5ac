//! Owned memory regions, block pools and leases.
