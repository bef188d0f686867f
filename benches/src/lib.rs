//! Criterion benches, one file per hot path: `cargo bench -p dormouse-benches`.
