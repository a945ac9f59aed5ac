//! Framed sockets.
