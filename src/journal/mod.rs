//! The journal of accepted tokens, its cursors, and recovery.
