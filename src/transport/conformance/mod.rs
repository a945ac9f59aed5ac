//! What every path must do, as checks that any [`Transport`] can be run through. Each panics where a
//! promise is broken. [`transport_conformance!`](crate::transport_conformance) makes tests of them.

mod faults;
mod lifetime;
mod moves;
mod rig;

use std::sync::Arc;

pub use faults::*;
pub use lifetime::*;
pub use moves::*;

use crate::mem::Region;
use crate::transport::{Pace, Path, Tap, Transport};

/// How to get a path to be checked.
pub trait Rig: Sync {
    /// The path.
    fn path(&self) -> Path;

    /// An owner's transport and an initiator's, connected by nothing yet; the tap and pace go into
    /// both.
    fn pair(&self, tap: Option<Arc<dyn Tap>>, pace: Option<Arc<Pace>>) -> [Box<dyn Transport>; 2];

    /// Memory of a kind that the path can serve.
    fn region(&self, len: u64) -> Region {
        match self.path() {
            Path::Shm => Region::memfd("conformance", len),
            _ => Region::anonymous(len),
        }
        .expect("memory for a test")
    }
}

/// A test for each check, over the rig that `$rig` evaluates to.
#[macro_export]
macro_rules! transport_conformance {
    ($name:ident, $rig:expr) => {
        mod $name {
            use super::*;
            $crate::transport_conformance! { @each $rig;
                odd_sizes_arrive_and_nothing_around_them_changes
                scattered_spans_land_each_in_its_place
                bad_transfers_are_handed_back
                refusals_are_typed_and_the_links_other_work_survives
                five_concurrent_migrations_bring_the_right_bytes
                completed_is_visible_to_whoever_reads_next
                cancelled_memory_is_not_touched_by_what_comes_later
                a_put_cancelled_half_way_leaves_the_link_in_order
                a_deadline_ends_a_transfer_and_its_late_reply_touches_nothing
                a_dropped_link_touches_nothing_and_leaks_no_lease
                an_epoch_that_ends_mid_flight_stops_its_transfers
                revoked_staging_is_not_written_by_what_was_in_flight
                revoking_one_grant_leaves_the_others
                a_flipped_bit_is_caught_by_the_wire_check_or_left_to_the_digest
                a_pace_bounds_the_rate
                blocks_in_use_are_waited_for_and_then_refused_as_busy
                batches_complete_once_each_and_are_bounded
                an_owner_that_goes_away_ends_what_is_in_flight
                a_peer_that_does_not_read_keeps_no_writer_waiting
                a_tap_sees_what_travels
            }
        }
    };
    (@each $rig:expr; $($check:ident)*) => {
        $(
            #[test]
            fn $check() {
                $crate::transport::conformance::$check(&$rig);
            }
        )*
    };
}
