//! When a model that was woken with an unpacked session gets a packed one.
//!
//! A packed session runs faster but takes long to build and holds a second copy of the weights.
//! The runs ahead are not known; a model is taken to have as many before it as it had since it
//! woke, or as it usually has, so that what a needless build costs is never much more than what
//! its runs have already lost. The build itself is not known here.

use std::time::Duration;

/// What packing costs and is worth, as measured when the model was prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// By how much a packed run is shorter.
    pub gain_per_run: Duration,
    /// What building the packed session takes.
    pub build: Duration,
}

/// When a build may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpgradePolicy {
    /// Runs since the model woke before which nothing is built, whatever it promises.
    pub min_runs: u32,
    /// How many times the expected gain must exceed the cost of the build.
    pub margin: u32,
}

impl Default for UpgradePolicy {
    fn default() -> Self {
        Self {
            min_runs: 2,
            margin: 1,
        }
    }
}

/// Names one build, so that the end of a cancelled one is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BuildId(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// The session is unpacked.
    Unpacked,
    /// A packed session is being built.
    Building(BuildId),
    /// The session is packed.
    Packed,
    /// The build failed; the next one is tried after the next wake.
    GivenUp,
}

/// Decides once per wake whether and when the packed session is built.
#[derive(Clone, Debug)]
pub struct Upgrade {
    policy: UpgradePolicy,
    packing: Option<Packing>,
    progress: Progress,
    builds: u32,
    /// Runs since the model woke.
    runs: u32,
    /// Moving mean of the runs between a wake and the following park or close.
    usual_runs: Option<u32>,
}

impl Upgrade {
    /// A model of which nothing says yet that packing pays.
    pub fn new(policy: UpgradePolicy) -> Self {
        Self {
            policy,
            packing: None,
            progress: Progress::Unpacked,
            builds: 0,
            runs: 0,
            usual_runs: None,
        }
    }

    /// Takes the verdict of the preparation; `None` when packing does not pay.
    pub fn set_packing(&mut self, packing: Option<Packing>) {
        self.packing = packing;
    }

    /// Whether a build is under way.
    pub fn is_building(&self) -> bool {
        matches!(self.progress, Progress::Building(_))
    }

    /// A run ended.
    pub fn ran(&mut self) {
        self.runs = self.runs.saturating_add(1);
    }

    /// Starts a build when its gain is expected to exceed its cost, however long the queue is:
    /// that is when shorter runs are wanted most.
    pub fn poll(&mut self) -> Option<BuildId> {
        let packing = self.packing?;
        let ready = self.progress == Progress::Unpacked && self.runs >= self.policy.min_runs;
        if !ready {
            return None;
        }
        let gain = packing.gain_per_run.saturating_mul(self.runs_ahead());
        if gain <= packing.build.saturating_mul(self.policy.margin) {
            return None;
        }
        let id = BuildId(self.builds);
        self.builds = self.builds.wrapping_add(1);
        self.progress = Progress::Building(id);
        Some(id)
    }

    /// Whether the session of this build is still waited for.
    pub fn wants(&self, id: BuildId) -> bool {
        self.progress == Progress::Building(id)
    }

    /// A build succeeded; whether its session is still wanted.
    pub fn built(&mut self, id: BuildId) -> bool {
        let wanted = self.progress == Progress::Building(id);
        if wanted {
            self.progress = Progress::Packed;
        }
        wanted
    }

    /// A build failed or found no memory.
    pub fn build_failed(&mut self, id: BuildId) {
        if self.progress == Progress::Building(id) {
            self.progress = Progress::GivenUp;
        }
    }

    /// The model is parked or closed: a packed session is gone, a build under way is cancelled.
    pub fn dropped(&mut self) {
        let runs = std::mem::take(&mut self.runs);
        // A model that went down unused says nothing about the calls it gets.
        if runs > 0 {
            self.usual_runs = Some(match self.usual_runs {
                None => runs,
                Some(usual) => usual - usual / 4 + runs / 4,
            });
        }
        self.progress = Progress::Unpacked;
    }

    fn runs_ahead(&self) -> u32 {
        let usual = self.usual_runs.unwrap_or(0);
        self.runs.max(usual.saturating_sub(self.runs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKING: Packing = Packing {
        gain_per_run: Duration::from_millis(20),
        build: Duration::from_millis(200),
    };

    fn woken() -> Upgrade {
        let mut upgrade = Upgrade::new(UpgradePolicy::default());
        upgrade.set_packing(Some(PACKING));
        upgrade
    }

    fn run(upgrade: &mut Upgrade, runs: u32) -> Option<BuildId> {
        for _ in 0..runs {
            upgrade.ran();
        }
        upgrade.poll()
    }

    #[test]
    fn packed_session_is_built_once_the_runs_so_far_would_have_paid_for_it() {
        let mut upgrade = woken();
        assert_eq!(run(&mut upgrade, 10), None);
        let id = run(&mut upgrade, 1).unwrap();
        assert!(upgrade.is_building());
        assert_eq!(run(&mut upgrade, 100), None);
        assert!(upgrade.built(id));
        assert_eq!(upgrade.progress, Progress::Packed);
        assert_eq!(run(&mut upgrade, 100), None);
    }

    #[test]
    fn model_that_usually_runs_often_is_upgraded_soon_after_it_woke() {
        let mut upgrade = woken();
        run(&mut upgrade, 1000);
        upgrade.dropped();
        assert_eq!(run(&mut upgrade, 1), None);
        assert!(run(&mut upgrade, 1).is_some());
    }

    #[test]
    fn model_that_usually_runs_once_is_never_upgraded() {
        let mut upgrade = woken();
        for _ in 0..100 {
            assert_eq!(run(&mut upgrade, 1), None);
            upgrade.dropped();
        }
    }

    #[test]
    fn nothing_is_built_where_packing_does_not_pay() {
        let mut upgrade = woken();
        upgrade.set_packing(None);
        assert_eq!(run(&mut upgrade, 1000), None);
        upgrade.set_packing(Some(Packing {
            gain_per_run: Duration::ZERO,
            ..PACKING
        }));
        assert_eq!(run(&mut upgrade, 1000), None);
    }

    #[test]
    fn session_of_a_cancelled_build_is_not_wanted() {
        let mut upgrade = woken();
        let first = run(&mut upgrade, 11).unwrap();
        upgrade.dropped();
        let second = run(&mut upgrade, 11).unwrap();
        assert!(!upgrade.built(first));
        assert!(upgrade.is_building());
        assert!(upgrade.built(second));
    }

    #[test]
    fn failed_build_is_tried_again_only_after_the_next_wake() {
        let mut upgrade = woken();
        let id = run(&mut upgrade, 11).unwrap();
        upgrade.build_failed(id);
        assert_eq!(run(&mut upgrade, 1000), None);
        upgrade.dropped();
        assert!(run(&mut upgrade, 1000).is_some());
    }
}
