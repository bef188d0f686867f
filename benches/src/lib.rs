//! The server's hot paths as named steps that always do the same work.
//!
//! `cargo bench -p dormouse-benches` times them; `cargo counts` counts their instructions and
//! compares them with `counts.json`.

pub mod counts;
mod echo;
pub mod hot_paths;
mod requests;
pub mod valgrind;
