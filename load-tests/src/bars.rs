//! What was promised, and whether it was kept.

use serde::{Deserialize, Serialize};

use crate::table::{Titled, number};

/// One promise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) wanted: String,
    pub(crate) found: String,
    /// None when it was not measured, or for too short a time to tell.
    pub(crate) met: Option<bool>,
    #[serde(default)]
    pub(crate) kind: BarKind,
}

/// What it means that a bar was missed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BarKind {
    /// The command fails.
    #[default]
    Must,
    /// How fast this machine is has a part in it: it is told, and fails only a strict run.
    Speed,
    /// Nothing was promised.
    Aim,
}

impl Bar {
    pub(crate) fn new(
        name: impl Into<String>,
        wanted: impl Into<String>,
        found: impl Into<String>,
        met: bool,
    ) -> Self {
        Self {
            name: name.into(),
            wanted: wanted.into(),
            found: found.into(),
            met: Some(met),
            kind: BarKind::Must,
        }
    }

    /// A number that may not be exceeded.
    pub(crate) fn at_most(name: impl Into<String>, most: f64, found: f64, unit: &str) -> Self {
        Self::new(
            name,
            format!("at most {most:.1}{unit}"),
            format!("{found:.1}{unit}"),
            found <= most,
        )
    }

    /// The same for a number that may not have been measured.
    pub(crate) fn most(name: impl Into<String>, most: f64, found: Option<f64>, unit: &str) -> Self {
        let wanted = format!("at most {}{unit}", number(most));
        Self::measured(name, wanted, found, (unit, most, |found| found <= most))
    }

    /// A number that must be reached.
    pub(crate) fn least(
        name: impl Into<String>,
        least: f64,
        found: Option<f64>,
        unit: &str,
    ) -> Self {
        let wanted = format!("at least {}{unit}", number(least));
        Self::measured(name, wanted, found, (unit, least, |found| found >= least))
    }

    fn measured(
        name: impl Into<String>,
        wanted: String,
        found: Option<f64>,
        (unit, limit, is_met): (&str, f64, impl Fn(f64) -> bool),
    ) -> Self {
        match found {
            Some(found) => {
                let mut words = number(found);
                // Rounding must not hide on which side of the limit it is.
                if found != limit && words == number(limit) {
                    words = format!("{found:.4}");
                }
                Self::new(name, wanted, format!("{words}{unit}"), is_met(found))
            }
            None => Self::new(name, wanted, "not measured", false).unjudged(),
        }
    }

    /// A count that must be the same on both sides.
    pub(crate) fn equal(name: impl Into<String>, wanted: u64, found: u64) -> Self {
        Self::new(name, wanted.to_string(), found.to_string(), wanted == found)
    }

    /// There may be no errors, of which the first is told.
    pub(crate) fn no_errors(name: impl Into<String>, errors: &[String]) -> Self {
        let found = match errors.first() {
            Some(first) => format!("{}, the first: {first}", errors.len()),
            None => "0".to_owned(),
        };
        Self::new(name, "0", found, errors.is_empty())
    }

    /// The same, but the run was too short to tell.
    pub(crate) fn unjudged(self) -> Self {
        Self { met: None, ..self }
    }

    /// The same, but the machine's speed has a part in it.
    pub(crate) fn of_speed(self) -> Self {
        Self {
            kind: BarKind::Speed,
            ..self
        }
    }

    /// The same, but nothing was promised.
    pub(crate) fn aim(self) -> Self {
        Self {
            kind: BarKind::Aim,
            ..self
        }
    }

    /// Whether a command has to fail for it.
    pub(crate) fn fails(&self, strict: bool) -> bool {
        self.met == Some(false)
            && match self.kind {
                BarKind::Must => true,
                BarKind::Speed => strict,
                BarKind::Aim => false,
            }
    }

    /// `met`, `missed` or `not judged`.
    pub(crate) fn verdict(&self) -> &'static str {
        match (self.met, self.kind) {
            (Some(true), BarKind::Aim) => "aim met",
            (Some(true), _) => "met",
            (Some(false), BarKind::Aim) => "aim missed",
            (Some(false), _) => "MISSED",
            (None, _) => "not judged",
        }
    }
}

/// The bars of one measurement; none where it has none.
pub(crate) fn table(bars: &[Bar]) -> Option<Titled> {
    let rows = bars.iter().map(|bar| {
        vec![
            bar.name.clone(),
            bar.wanted.clone(),
            bar.found.clone(),
            bar.verdict().to_owned(),
        ]
    });
    let header = ["bar", "wanted", "found", "verdict"];
    (!bars.is_empty()).then(|| Titled::new("Bars", &header, rows.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_fails_only_strict_runs_and_aims_never() {
        let missed = Bar::most("a", 1.1, Some(1.2), "×");
        assert_eq!((missed.verdict(), &*missed.found), ("MISSED", "1.20×"));
        assert!(missed.fails(false));
        let of_speed = missed.clone().of_speed();
        assert!(!of_speed.fails(false) && of_speed.fails(true));
        let aim = missed.aim();
        assert!(!aim.fails(true) && aim.verdict() == "aim missed");
        let close = Bar::most("a", 1.1, Some(1.1041), "×");
        assert_eq!((close.verdict(), &*close.found), ("MISSED", "1.1041×"));
        let reached = Bar::least("b", 6.0, Some(6.0), "×");
        assert!(!reached.fails(true) && reached.wanted == "at least 6.00×");
    }

    #[test]
    fn what_was_not_measured_is_not_judged() {
        let bar = Bar::least("a", 6.0, None, "×");
        assert_eq!((bar.verdict(), bar.fails(true)), ("not judged", false));
    }

    #[test]
    fn bars_of_older_files_are_read() {
        let text = r#"{"name": "a", "wanted": "0", "found": "1", "met": false}"#;
        let bar: Bar = serde_json::from_str(text).unwrap();
        assert_eq!(bar, Bar::equal("a", 0, 1));
    }
}
