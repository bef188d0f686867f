//! What is measured: one module per hot path, driven through the code that the server runs.

pub mod admission;
pub mod batcher;
pub mod call;
pub mod config;
pub mod decode;
pub mod encode;
pub mod lifecycle;
pub mod rows;
pub mod store;

/// Something that is done once more at each call.
pub type Step = Box<dyn FnMut()>;

/// A step that is measured, by its name.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    pub name: &'static str,
    /// Makes everything that the step needs.
    pub prepare: fn() -> Step,
}

/// All of them.
pub fn all() -> impl Iterator<Item = Workload> {
    [
        decode::WORKLOADS,
        rows::WORKLOADS,
        batcher::WORKLOADS,
        admission::WORKLOADS,
        lifecycle::WORKLOADS,
        config::WORKLOADS,
        store::WORKLOADS,
        encode::WORKLOADS,
        call::WORKLOADS,
    ]
    .into_iter()
    .flatten()
    .copied()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_workload_has_its_own_name_and_can_be_repeated() {
        let mut names = HashSet::new();
        for workload in all() {
            assert!(names.insert(workload.name), "{}", workload.name);
            let mut step = (workload.prepare)();
            step();
            step();
        }
    }
}
