//! KV pages: layouts, canonical order and the pure copy planner.
