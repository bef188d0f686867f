//! Triton's trace extension: which requests are traced, for all models or for one.
//!
//! A traced request is one event of the log when it has been answered; there are no trace files,
//! and nothing here names one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::error::ServeError;

/// Settings of which each overrides the one above it: a model's, the server's, the defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Given {
    level: Option<Level>,
    rate: Option<u32>,
    /// `Some(None)`: as many as there are.
    count: Option<Option<u64>>,
}

/// What is told of a traced request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level {
    /// When it came and how long it took.
    pub timestamps: bool,
    /// Names, types and shapes of its tensors.
    pub tensors: bool,
}

impl Level {
    fn is_off(self) -> bool {
        self == Self::default()
    }

    fn names(self) -> Vec<String> {
        if self.is_off() {
            return vec!["OFF".to_owned()];
        }
        let names = [(self.timestamps, "TIMESTAMPS"), (self.tensors, "TENSORS")];
        names
            .into_iter()
            .filter(|(set, _)| *set)
            .map(|(_, name)| name.to_owned())
            .collect()
    }
}

const DEFAULT_RATE: u32 = 1000;

/// One kind of settings with what was traced under them.
#[derive(Debug, Default)]
struct Scope {
    given: Given,
    seen: u64,
    traced: u64,
}

#[derive(Debug, Default)]
struct Scopes {
    server: Scope,
    models: BTreeMap<String, Scope>,
}

impl Scopes {
    /// What holds for a model, "" for those without settings of their own.
    fn effective(&self, model: &str) -> (Level, u32, Option<u64>) {
        let server = &self.server.given;
        let own = self.models.get(model).map(|scope| scope.given);
        let own = own.unwrap_or_default();
        (
            own.level.or(server.level).unwrap_or_default(),
            own.rate.or(server.rate).unwrap_or(DEFAULT_RATE),
            own.count.or(server.count).unwrap_or(None),
        )
    }
}

/// What is traced.
#[derive(Debug, Default)]
pub struct TraceSettings {
    /// Some request may be traced: all that is looked at while none is.
    is_on: AtomicBool,
    scopes: Mutex<Scopes>,
}

/// A setting's new value; none clears it, so that the one above it holds.
pub type Change = (String, Option<Vec<String>>);

impl TraceSettings {
    /// Whether any request may have to be traced.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Whether this request of a model is to be traced, and what is told of it.
    pub fn sample(&self, model: &str) -> Option<Level> {
        let mut scopes = self.scopes.lock();
        let (level, rate, count) = scopes.effective(model);
        if level.is_off() {
            return None;
        }
        let Scopes { server, models } = &mut *scopes;
        let scope = models.get_mut(model).unwrap_or(server);
        let is_due = scope.seen.is_multiple_of(u64::from(rate));
        scope.seen += 1;
        if !is_due || count.is_some_and(|count| scope.traced >= count) {
            return None;
        }
        scope.traced += 1;
        Some(level)
    }

    /// Changes the settings of a model, or of all with "": every one of `changes` or none.
    pub fn update(&self, model: &str, changes: &[Change]) -> Result<(), ServeError> {
        let mut scopes = self.scopes.lock();
        let known = match model {
            "" => Some(scopes.server.given),
            model => scopes.models.get(model).map(|scope| scope.given),
        };
        let mut given = known.unwrap_or_default();
        for (name, value) in changes {
            change(&mut given, name, value.as_deref())?;
        }
        // Counting starts anew: so many traces from now on.
        let scope = Scope {
            given,
            ..Scope::default()
        };
        if model.is_empty() {
            scopes.server = scope;
        } else if given == Given::default() {
            scopes.models.remove(model);
        } else {
            scopes.models.insert(model.to_owned(), scope);
        }
        let all = [&scopes.server].into_iter().chain(scopes.models.values());
        let on = all
            .into_iter()
            .any(|scope| scope.given.level.is_some_and(|level| !level.is_off()));
        self.is_on.store(on, Ordering::Relaxed);
        Ok(())
    }

    /// The settings that hold for a model, or for those without their own with "".
    pub fn current(&self, model: &str) -> Vec<(&'static str, Vec<String>)> {
        let (level, rate, count) = self.scopes.lock().effective(model);
        let count = count.map_or("-1".to_owned(), |count| count.to_string());
        vec![
            ("trace_file", vec![String::new()]),
            ("trace_level", level.names()),
            ("trace_rate", vec![rate.to_string()]),
            ("trace_count", vec![count]),
            ("log_frequency", vec!["0".to_owned()]),
        ]
    }
}

fn change(given: &mut Given, name: &str, value: Option<&[String]>) -> Result<(), ServeError> {
    match (name, value) {
        ("trace_file", _) => Err(ServeError::unsupported(
            "trace file location can not be updated through network protocol: traces go to the server's log",
        )),
        ("trace_level", None) => {
            given.level = None;
            Ok(())
        }
        ("trace_level", Some(names)) => {
            given.level = Some(level(names)?);
            Ok(())
        }
        ("trace_rate", value) => {
            given.rate = match value {
                None => None,
                Some(value) => Some(
                    number(name, value, "a whole number from 1")?
                        .filter(|&rate: &u32| rate > 0)
                        .ok_or_else(|| unexpected(name, value, "a whole number from 1"))?,
                ),
            };
            Ok(())
        }
        ("trace_count", value) => {
            const EXPECTED: &str = "a whole number, or -1 for no limit";
            given.count = match value {
                None => None,
                Some([value]) if value == "-1" => Some(None),
                Some(value) => Some(number(name, value, EXPECTED)?),
            };
            Ok(())
        }
        ("log_frequency", None) => Ok(()),
        ("log_frequency", Some([value])) if value == "0" => Ok(()),
        ("log_frequency", Some(_)) => Err(ServeError::unsupported(
            "'log_frequency' can only be 0: each trace is written to the log at once, there are no files to split them over",
        )),
        (name, _) => {
            let shown: String = name.chars().take(64).collect();
            Err(ServeError::invalid(format!(
                "unknown trace setting '{}': expected trace_level, trace_rate, trace_count or log_frequency",
                shown.escape_debug()
            )))
        }
    }
}

fn level(names: &[String]) -> Result<Level, ServeError> {
    let mut level = Level::default();
    for name in names {
        match name.as_str() {
            "OFF" => return Ok(Level::default()),
            "TIMESTAMPS" => level.timestamps = true,
            "TENSORS" => level.tensors = true,
            _ => {
                return Err(unexpected(
                    "trace_level",
                    std::slice::from_ref(name),
                    "OFF, TIMESTAMPS or TENSORS",
                ));
            }
        }
    }
    Ok(level)
}

fn number<T: std::str::FromStr>(
    name: &str,
    value: &[String],
    expected: &str,
) -> Result<Option<T>, ServeError> {
    match value {
        [text] => text
            .parse()
            .map(Some)
            .map_err(|_| unexpected(name, value, expected)),
        _ => Err(unexpected(name, value, expected)),
    }
}

fn unexpected(name: &str, value: &[String], expected: &str) -> ServeError {
    let got = match value {
        [value] => {
            let shown: String = value.chars().take(64).collect();
            format!("'{}'", shown.escape_debug())
        }
        values => format!("{} values", values.len()),
    };
    ServeError::invalid(format!(
        "unexpected value for trace setting '{name}': expected {expected}, got {got}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(name: &str, values: &[&str]) -> Change {
        let values = values.iter().map(|value| (*value).to_owned()).collect();
        (name.to_owned(), Some(values))
    }

    fn traced(settings: &TraceSettings, model: &str, requests: usize) -> usize {
        (0..requests)
            .filter(|_| settings.sample(model).is_some())
            .count()
    }

    #[test]
    fn every_nth_request_is_traced_until_the_count_is_reached() {
        let settings = TraceSettings::default();
        assert!(!settings.is_on());
        assert_eq!(traced(&settings, "m", 10), 0);
        let changes = [
            set("trace_level", &["TIMESTAMPS"]),
            set("trace_rate", &["3"]),
            set("trace_count", &["2"]),
        ];
        settings.update("", &changes).unwrap();
        assert!(settings.is_on());
        assert_eq!(traced(&settings, "m", 30), 2);
        settings.update("", &[set("trace_count", &["-1"])]).unwrap();
        assert_eq!(traced(&settings, "m", 30), 10);
        settings
            .update("", &[set("trace_level", &["OFF"])])
            .unwrap();
        assert!(!settings.is_on());
    }

    #[test]
    fn a_models_own_settings_come_before_the_servers() {
        let settings = TraceSettings::default();
        let on = [set("trace_level", &["TENSORS"]), set("trace_rate", &["1"])];
        settings.update("a", &on).unwrap();
        assert_eq!(
            (traced(&settings, "a", 5), traced(&settings, "b", 5)),
            (5, 0)
        );
        let rate = |model: &str| settings.current(model)[2].1[0].clone();
        assert_eq!((rate("a").as_str(), rate("b").as_str()), ("1", "1000"));
        let clear = [
            ("trace_level".to_owned(), None),
            ("trace_rate".to_owned(), None),
        ];
        settings.update("a", &clear).unwrap();
        assert_eq!(rate("a"), "1000");
        assert!(!settings.is_on());
    }

    #[test]
    fn a_wrong_setting_is_named_and_nothing_is_changed() {
        let settings = TraceSettings::default();
        for (name, value, expected) in [
            ("trace_file", "/etc/passwd", "can not be updated"),
            ("trace_level", "LOUD", "'LOUD'"),
            ("trace_rate", "0", "'trace_rate'"),
            ("trace_rate", "often", "'often'"),
            ("trace_count", "-2", "'-2'"),
            ("log_frequency", "5", "log_frequency"),
            ("trace_mode", "opentelemetry", "unknown trace setting"),
        ] {
            let changes = [set("trace_level", &["TIMESTAMPS"]), set(name, &[value])];
            let error = settings.update("", &changes).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
            assert!(!settings.is_on());
        }
    }
}
