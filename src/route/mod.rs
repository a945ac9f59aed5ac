//! The route record: the one decision point of a migration.
