//! Holds the plan of the house: which room may use which, where `unsafe` may stand, what pure rooms
//! keep out of, and how long a file may be. See `ARCHITECTURE.md`.
//!
//! A small lexer reads every file under `src` (comments and strings removed), so what is checked is
//! code: `use` items, inline paths, paths inside macros. Test code (`#[cfg(test)]`, files named
//! `tests.rs`) may use any room, and is held to nothing but the ban on `unsafe`.

#[path = "house/read.rs"]
mod read;

use read::{File, is_word, rooms_used, source_files, starts_with};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Which rooms a room may use. `id` is open to all.
const ARROWS: &[(&str, &[&str])] = &[
    ("page", &[]),
    ("digest", &["page"]),
    ("control_state", &[]),
    ("bandwidth", &["page"]),
    ("route", &[]),
    (
        "migrate",
        &["page", "digest", "control_state", "route", "bandwidth"],
    ),
    ("mem", &[]),
    ("wire", &[]),
    ("wal", &[]),
    ("gpu", &["mem", "page", "digest"]),
    ("verbs", &["mem"]),
    ("transport", &["mem", "wire", "verbs", "gpu"]),
    ("engine", &["page", "digest", "control_state", "mem"]),
    ("metastore", &["route", "wire", "wal"]),
    ("journal", &["route", "wal"]),
    ("replica", &["page", "digest", "mem", "metastore"]),
    ("drive", &["migrate", "route", "wire", "metastore"]),
    (
        "rpc",
        &[
            "page",
            "route",
            "control_state",
            "migrate",
            "transport",
            "wire",
        ],
    ),
    (
        "gateway",
        &[
            "drive",
            "migrate",
            "route",
            "journal",
            "metastore",
            "wire",
            "rpc",
        ],
    ),
    ("supervise", &["route", "metastore", "gpu"]),
    (
        "elastic",
        &["route", "metastore", "gpu", "bandwidth", "migrate"],
    ),
    ("node", ALL_BUT_SHELL),
    ("capi", ALL_BUT_SHELL),
    ("bin", ALL),
];

const ALL_BUT_SHELL: &[&str] = &[
    "page",
    "digest",
    "control_state",
    "bandwidth",
    "route",
    "migrate",
    "mem",
    "wire",
    "wal",
    "gpu",
    "verbs",
    "transport",
    "engine",
    "metastore",
    "journal",
    "replica",
    "drive",
    "rpc",
    "gateway",
    "supervise",
    "elastic",
];

const ALL: &[&str] = &["*"];

/// Arrows beyond the plan, each with its reason. One that no code uses any more fails the test.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    // (room, uses, reason)
    (
        "rpc",
        "engine",
        "serves the engine's contract over gRPC, and is an engine behind it",
    ),
    (
        "rpc",
        "digest",
        "page and leaf digests are part of the engine's contract",
    ),
    (
        "rpc",
        "mem",
        "mirrors a remote engine's slots in blocks that transports can lease",
    ),
];

/// Rooms that do no I/O and read no clock.
const PURE: &[&str] = &[
    "page",
    "digest",
    "control_state",
    "bandwidth",
    "route",
    "migrate",
    "id",
];

/// What pure rooms keep out of. Rayon's pools are given by the caller and stay allowed.
const IMPURE: &[&str] = &[
    "std::fs",
    "std::net",
    "std::env",
    "std::process",
    "std::thread",
    "std::os",
    "std::io::stdin",
    "std::time::Instant",
    "std::time::SystemTime",
    "rustix",
    "libc",
    "tokio",
    "getrandom",
];

/// Where `unsafe` may stand, and why.
const UNSAFE: &[(&str, &str)] = &[
    ("src/mem/", "maps memory and hands out leases on it"),
    ("src/gpu/", "calls the CUDA driver"),
    ("src/verbs/", "calls libibverbs"),
    (
        "src/transport/",
        "hands addresses to the kernel and to devices",
    ),
    ("src/capi/", "is called from C"),
    (
        "src/wire/slices.rs",
        "asks the kernel for short time slices, by a call that no safe crate wraps",
    ),
    (
        "src/digest/simd.rs",
        "an AVX-512 kernel; through blake3's hash_many, cold HND pages reach 0.83 of contiguous BLAKE3",
    ),
];

/// Crates that belong to one room.
const CONFINED: &[(&str, &[&str])] = &[
    ("cudarc", &["gpu"]),
    ("nvml_wrapper", &["gpu"]),
    ("io_uring", &[]),
    ("clap", &["bin"]),
    ("anyhow", &["bin"]),
    ("indicatif", &["bin"]),
];

const MAX_LINES: usize = 600;

/// Files that may be longer, each with its reason.
const LONG: &[(&str, &str)] = &[];

fn house() -> Vec<File> {
    let files = source_files(Path::new(env!("CARGO_MANIFEST_DIR")));
    assert!(files.len() > 20, "only {} files read", files.len());
    files
}

#[test]
fn rooms_use_only_what_the_plan_allows() {
    let arrows: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    let exceptions: BTreeSet<(&str, &str)> = EXCEPTIONS.iter().map(|(a, b, _)| (*a, *b)).collect();
    let mut needed = BTreeSet::new();
    let mut wrong = Vec::new();
    let files = house();
    // What else stands at the crate's root (exported macros) is no room.
    let rooms: BTreeSet<String> = files.iter().map(|f| f.room.clone()).collect();
    for file in files {
        if file.room == "lib" || file.room == "bin" {
            continue;
        }
        let allowed: &[&str] = match file.room.as_str() {
            "id" => &[],
            room => match arrows.get(room) {
                Some(allowed) => allowed,
                None => {
                    wrong.push(format!("{}: room {room} is not in the plan", file.name));
                    continue;
                }
            },
        };
        for used in rooms_used(&file).intersection(&rooms) {
            let arrow = (file.room.as_str(), used.as_str());
            match exceptions.iter().find(|e| **e == arrow) {
                Some(exception) => {
                    needed.insert(*exception);
                }
                None if allowed.contains(&used.as_str()) => {}
                None => wrong.push(format!("{}: {} may not use {used}", file.name, file.room)),
            }
        }
    }
    for unused in exceptions.difference(&needed) {
        wrong.push(format!("exception {unused:?} is not needed any more"));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_plan_itself_has_no_cycle() {
    // Each room may use only rooms that stand before it in some order: peel off the leaves.
    let mut left: BTreeMap<&str, BTreeSet<&str>> = ARROWS
        .iter()
        .filter(|(room, _)| *room != "bin")
        .map(|(room, uses)| (*room, uses.iter().copied().collect()))
        .collect();
    for (room, uses, _) in EXCEPTIONS {
        left.get_mut(room).unwrap().insert(uses);
    }
    while !left.is_empty() {
        let done: Vec<&str> = left
            .iter()
            .filter(|(_, uses)| uses.iter().all(|u| !left.contains_key(u)))
            .map(|(room, _)| *room)
            .collect();
        assert!(!done.is_empty(), "rooms use each other in a ring: {left:?}");
        done.iter().for_each(|room| {
            left.remove(room);
        });
    }
}

#[test]
fn pure_rooms_do_no_io_and_read_no_clock() {
    let mut wrong = Vec::new();
    for file in house() {
        if !PURE.contains(&file.room.as_str()) {
            continue;
        }
        for path in &file.paths {
            if let Some(bad) = IMPURE.iter().find(|bad| starts_with(path, bad)) {
                wrong.push(format!("{}: {bad} in a pure room", file.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn unsafe_stands_only_where_its_reason_is() {
    let wrong: Vec<String> = house()
        .into_iter()
        .filter(|f| f.tokens.iter().any(|t| is_word(Some(t), "unsafe")))
        .filter(|f| !UNSAFE.iter().any(|(place, _)| f.name.starts_with(place)))
        .map(|f| f.name)
        .collect();
    assert!(wrong.is_empty(), "unsafe in: {}", wrong.join(", "));
}

#[test]
fn crates_with_one_home_stay_there() {
    let mut wrong = Vec::new();
    for file in house() {
        for (name, rooms) in CONFINED {
            if !rooms.contains(&file.room.as_str()) && file.paths.iter().any(|p| p[0] == *name) {
                wrong.push(format!("{}: {name} belongs to {rooms:?}", file.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_file_is_longer_than_one_sitting() {
    let mut wrong = Vec::new();
    let files = house();
    for file in &files {
        let excepted = LONG.iter().any(|(name, _)| *name == file.name);
        if file.lines > MAX_LINES && !excepted {
            wrong.push(format!("{}: {} lines", file.name, file.lines));
        }
        if file.lines <= MAX_LINES && excepted {
            wrong.push(format!("{} fits now: drop its exception", file.name));
        }
    }
    for (name, _) in LONG {
        if !files.iter().any(|f| f.name == *name) {
            wrong.push(format!("{name} does not exist: drop its exception"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
