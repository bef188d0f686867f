//! Settings of models that run in processes of their own.

use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use dormouse_core::deaths::DeathPolicy;
use dormouse_core::id::ByteSize;
use serde::Deserialize;

use super::file::{Span, from_text};
use super::{ConfigError, invalid};
use crate::cli::serve::parse_bool;

/// Where a model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IsolationMode {
    /// In the server's process.
    #[default]
    None,
    /// In a process of its own.
    Process,
}

/// Which models run in processes of their own, and what becomes of these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IsolationConfig {
    /// Of models that no rule names and that do not ask for isolation themselves.
    pub default: IsolationMode,
    /// The first that fits a model's name decides, before the default.
    pub rules: Vec<IsolationRule>,
    /// Whether a model is tried out before its first load; none: when it is isolated.
    pub trial_load: Option<bool>,
    pub trial_time: Duration,
    /// Address space of a trial; none: by the model's size.
    pub trial_memory: Option<ByteSize>,
    pub deaths: DeathPolicy,
    /// The longest a run may take.
    pub watchdog: Duration,
    /// The longest a load may take.
    pub load_timeout: Duration,
    /// Memory for tensors that is shared with one worker.
    pub shared_memory: ByteSize,
}

impl Default for IsolationConfig {
    fn default() -> Self {
        Self {
            default: IsolationMode::None,
            rules: Vec::new(),
            trial_load: None,
            trial_time: Duration::from_secs(60),
            trial_memory: None,
            deaths: DeathPolicy::default(),
            watchdog: Duration::from_secs(60),
            load_timeout: Duration::from_secs(300),
            shared_memory: ByteSize::gib(2),
        }
    }
}

impl IsolationConfig {
    /// Whether a model runs in a process of its own. A model that asks for it always does; what
    /// the server demands, a model cannot undo.
    pub fn isolates(&self, name: &str, asks: bool) -> bool {
        let rule = self.rules.iter().find(|rule| rule.models.fits(name));
        let mode = rule.map_or(self.default, |rule| rule.isolation);
        asks || mode == IsolationMode::Process
    }
}

/// Where the models of a kind run.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IsolationRule {
    /// Which models.
    pub models: Pattern,
    pub isolation: IsolationMode,
}

/// A model's name, or names with `*` in the place of any characters.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Pattern(String);

impl TryFrom<String> for Pattern {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl FromStr for Pattern {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "" => Err("a pattern of models' names must not be empty: '*' stands for all"),
            _ => Ok(Self(text.to_owned())),
        }
    }
}

impl Pattern {
    /// Whether it stands for this name.
    pub fn fits(&self, name: &str) -> bool {
        let Some((first, rest)) = self.0.split_once('*') else {
            return self.0 == name;
        };
        let Some(mut name) = name.strip_prefix(first) else {
            return false;
        };
        let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
        // The first place that fits leaves most for the others.
        for part in middle.split('*').filter(|part| !part.is_empty()) {
            match name.find(part) {
                None => return false,
                Some(place) => name = &name[place + part.len()..],
            }
        }
        name.ends_with(last)
    }
}

/// Flags of `dormouse serve` about isolation.
#[derive(Args, Clone, Debug, Default)]
pub struct IsolationArgs {
    /// Where models run: in the server's process (none), or each in a process of its own, which
    /// may crash or hang without harm to others (process) [default: none]
    #[arg(
        long,
        value_name = "MODE",
        env = "DORMOUSE_ISOLATION",
        help_heading = "Isolation"
    )]
    pub isolation: Option<IsolationMode>,
    /// Load a model that was never loaded before in a throw-away process first, and refuse it if
    /// that crashes [default: true for isolated models]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, env = "DORMOUSE_TRIAL_LOAD", help_heading = "Isolation")]
    pub trial_load: Option<bool>,
}

/// The file's `[isolation]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IsolationSection {
    pub default: Option<IsolationMode>,
    pub rules: Vec<IsolationRule>,
    pub trial_load: Option<bool>,
    #[serde(deserialize_with = "from_text")]
    pub trial_time: Option<Span>,
    #[serde(deserialize_with = "from_text")]
    pub trial_memory: Option<ByteSize>,
    pub max_deaths: Option<u32>,
    #[serde(deserialize_with = "from_text")]
    pub death_window: Option<Span>,
    #[serde(deserialize_with = "from_text")]
    pub watchdog: Option<Span>,
    #[serde(deserialize_with = "from_text")]
    pub load_timeout: Option<Span>,
    #[serde(deserialize_with = "from_text")]
    pub shared_memory: Option<ByteSize>,
}

impl IsolationConfig {
    /// Joins flags with the file's section.
    pub(super) fn join(args: &IsolationArgs, file: IsolationSection) -> Result<Self, ConfigError> {
        let defaults = Self::default();
        let span = |setting: &'static str, span: Option<Span>, default: Duration| match span {
            Some(Span(Duration::ZERO)) => Err(invalid(setting, "must be longer than 0s")),
            span => Ok(span.map_or(default, |span| span.0)),
        };
        Ok(Self {
            default: args.isolation.or(file.default).unwrap_or_default(),
            rules: file.rules,
            trial_load: args.trial_load.or(file.trial_load),
            trial_time: span("isolation.trial_time", file.trial_time, defaults.trial_time)?,
            trial_memory: file.trial_memory,
            deaths: DeathPolicy {
                limit: file.max_deaths.unwrap_or(defaults.deaths.limit),
                window: span(
                    "isolation.death_window",
                    file.death_window,
                    defaults.deaths.window,
                )?,
                ..defaults.deaths
            },
            watchdog: span("isolation.watchdog", file.watchdog, defaults.watchdog)?,
            load_timeout: span(
                "isolation.load_timeout",
                file.load_timeout,
                defaults.load_timeout,
            )?,
            shared_memory: file.shared_memory.unwrap_or(defaults.shared_memory),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_stand_for_names() {
        let cases = [
            ("exact", "exact", true),
            ("exact", "exactly", false),
            ("*", "", true),
            ("*", "anything", true),
            ("user-*", "user-7", true),
            ("user-*", "a-user-7", false),
            ("*-beta", "x-beta", true),
            ("*-beta", "x-beta-2", false),
            ("a*b*c", "a1b2c", true),
            ("a*b*c", "acb", false),
            ("ab*ba", "aba", false),
        ];
        for (pattern, name, fits) in cases {
            let pattern: Pattern = pattern.parse().unwrap();
            assert_eq!(pattern.fits(name), fits, "{pattern:?} {name}");
        }
    }

    #[test]
    fn the_first_rule_decides_and_a_model_can_only_ask_for_more() {
        let section: IsolationSection = toml::from_str(
            r#"
            default = "process"
            rules = [
                { models = "trusted-*", isolation = "none" },
                { models = "*", isolation = "process" },
            ]
            max_deaths = 5
            watchdog = "2s"
            "#,
        )
        .unwrap();
        let config = IsolationConfig::join(&IsolationArgs::default(), section).unwrap();
        assert!(config.isolates("any", false));
        assert!(!config.isolates("trusted-a", false));
        assert!(config.isolates("trusted-a", true));
        assert_eq!(config.deaths.limit, 5);
        assert_eq!(config.watchdog, Duration::from_secs(2));
        assert!(!IsolationConfig::default().isolates("any", false));
    }

    #[test]
    fn a_watchdog_that_kills_everything_is_refused() {
        let section: IsolationSection = toml::from_str(r#"watchdog = "0s""#).unwrap();
        let error = IsolationConfig::join(&IsolationArgs::default(), section).unwrap_err();
        assert_eq!(
            error.to_string(),
            "isolation.watchdog: must be longer than 0s"
        );
    }
}
