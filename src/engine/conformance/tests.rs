//! The suite against a toy engine: good, it holds; spoilt, the named clause breaks.

use super::toy::{ToyConfig, ToyDriver};
use super::*;
use std::collections::BTreeSet;

/// Block size, axis order and order of allocation differ between the two.
fn pair() -> Pair {
    Pair {
        source: Box::new(ToyDriver::new(ToyConfig::small(1))),
        destination: Box::new(ToyDriver::new(ToyConfig::wide(2))),
    }
}

#[test]
fn a_good_engine_holds_every_clause() {
    let report = run(pair);
    assert!(report.holds(), "{report}");
    let skipped: Vec<_> = report.not_applicable().collect();
    assert!(skipped.is_empty(), "{report}");
}

#[test]
fn every_clause_breaks_for_the_engine_that_breaks_it() {
    for fault in Fault::ALL {
        let outcome = run_clause(fault.clause(), || fault.spoil(pair()));
        assert!(
            matches!(outcome, Some(Outcome::Broken(_))),
            "{fault:?} went unseen by {}: {outcome:?}",
            fault.clause()
        );
    }
}

#[test]
fn every_clause_has_its_fault_and_a_name_of_its_own() {
    let ids: Vec<&str> = clauses().map(|c| c.id).collect();
    let unique: BTreeSet<&str> = ids.iter().copied().collect();
    assert_eq!(unique.len(), ids.len());
    let seen: BTreeSet<&str> = Fault::ALL.iter().map(|f| f.clause()).collect();
    assert_eq!(seen, unique);
}
