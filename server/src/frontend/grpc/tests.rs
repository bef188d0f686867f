//! The front end in front of a stand-in server: below the socket, and over it.

mod call;
pub(super) mod fake;
mod socket;
