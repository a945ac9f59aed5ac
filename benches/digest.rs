//! `cargo bench --bench digest`: leaf hashing of resident pages against the blake3 crate on
//! contiguous memory, interleaved in this run. One JSON object a line.

use std::time::Instant;

use moonlivekv::digest::{Scheme, measure::Workload};
use moonlivekv::page::Order;

const BYTES: usize = 256 << 20;

fn main() {
    // `cargo test` runs benches too: then one small round shows that it works.
    let quick = !std::env::args().any(|a| a == "--bench");
    let (bytes, rounds) = if quick { (8 << 20, 1) } else { (BYTES, 5) };
    let start = Instant::now();
    let now = || start.elapsed().as_nanos() as u64;
    for order in [Order::Nhd, Order::Hnd] {
        let workload = Workload::new(order, bytes).expect("the workload's layout is valid");
        let tail = workload.measure_tail(40 * rounds, &now).expect("resident");
        print(&tail);
        for threads in [1, 2] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let pool = pool.expect("threads can be started");
            for page_tokens in [1, 4, 8, 16, 32, 64] {
                let scheme = Scheme::Blake3Leaves;
                let row = workload.measure(scheme, page_tokens, &pool, rounds, &now);
                print(&row.expect("resident"));
            }
            for scheme in [Scheme::Sha256Leaves, Scheme::Sha256Flat] {
                let row = workload.measure(scheme, 16, &pool, 1, &now);
                print(&row.expect("resident"));
            }
        }
    }
}

fn print(row: &moonlivekv::digest::measure::Measured) {
    println!(
        r#"{{"bench":"digest","case":"{}","value":{:.3},"unit":"GB/s","gbps":{:.3},"p50_us":{:.1},"against":{:.3},"ratio":{:.3}}}"#,
        row.case,
        row.gbps(),
        row.gbps(),
        row.ours_ns as f64 / 1e3,
        row.against_gbps(),
        row.ratio()
    );
}
