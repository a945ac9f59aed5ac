//! ControlStateV1: the explicit binary codec of a request's decode-control state, and its digest.
