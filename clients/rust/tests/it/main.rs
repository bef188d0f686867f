//! The client against a server that really listens, and does as each model's name says.

mod calls;
mod fake;
mod retries;
mod streams;
