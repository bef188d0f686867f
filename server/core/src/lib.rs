//! Dormouse's vocabulary and decisions.
//!
//! Every decision is a plain struct driven by `(event, now)`: the server, the tests and the
//! simulator run the same code. Nothing here performs IO, awaits, logs or reads a clock.

#![forbid(unsafe_code)]

pub mod admission;
pub mod batch;
pub mod budget;
pub mod code;
pub mod datatype;
pub mod deaths;
pub mod dispatch;
pub mod id;
pub mod keep_alive;
pub mod lifecycle;
pub mod order;
pub mod profile;
pub mod sequence;
pub mod shape;
pub mod side_by_side;
pub mod time;
pub mod upgrade;
pub mod urgency;
