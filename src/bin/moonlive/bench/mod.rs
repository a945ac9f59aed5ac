//! Measurements: each figure beside its ceiling or control, taken in the same run, alternately.

mod plot;
mod progress;
mod quiet;
mod row;
mod stats;
mod table;
