//! Which traces are recorded, by OpenTelemetry's own names.

use super::{SpanContext, TraceId};

/// Decides once per trace, in the same way wherever it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    /// What callers decided holds.
    parent_based: bool,
    /// Traces whose lower 63 bits are below this are recorded.
    below: u64,
}

const ALL: u64 = 1 << 63;

/// A sampler that is none.
#[derive(Debug, thiserror::Error)]
pub enum InvalidSampler {
    #[error(
        "unknown sampler '{0}': known are always_on, always_off, traceidratio, \
         parentbased_always_on, parentbased_always_off and parentbased_traceidratio"
    )]
    Name(String),
    #[error("the share of traces to record is '{0}': expected a number from 0 to 1")]
    Share(String),
}

impl Default for Sampler {
    fn default() -> Self {
        Self {
            parent_based: true,
            below: ALL,
        }
    }
}

impl Sampler {
    /// From `OTEL_TRACES_SAMPLER` and its argument.
    pub fn parse(name: &str, argument: Option<&str>) -> Result<Self, InvalidSampler> {
        let (parent_based, root) = match name.strip_prefix("parentbased_") {
            Some(root) => (true, root),
            None => (false, name),
        };
        let below = match root {
            "always_on" => ALL,
            "always_off" => 0,
            "traceidratio" => share(argument)?,
            _ => return Err(InvalidSampler::Name(name.to_owned())),
        };
        Ok(Self {
            parent_based,
            below,
        })
    }

    /// Whether a trace is recorded, given what the caller says of its own span.
    pub(super) fn wants(&self, trace: TraceId, caller: Option<SpanContext>) -> bool {
        match caller {
            Some(caller) if self.parent_based => caller.sampled,
            _ => (trace.0 as u64 & (ALL - 1)) < self.below,
        }
    }
}

fn share(argument: Option<&str>) -> Result<u64, InvalidSampler> {
    let Some(text) = argument else {
        return Ok(ALL);
    };
    let share: Option<f64> = text.parse().ok();
    share
        .filter(|share| (0.0..=1.0).contains(share))
        .map(|share| (share * ALL as f64) as u64)
        .ok_or_else(|| InvalidSampler::Share(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spans::SpanId;

    #[test]
    fn samplers_have_opentelemetrys_names() {
        let caller = |sampled| {
            Some(SpanContext {
                trace: TraceId(1),
                span: SpanId(1),
                sampled,
            })
        };
        let (low, high) = (TraceId(5), TraceId(u128::from(ALL - 1)));
        for (name, argument, expected) in [
            ("always_on", None, [true, true, true, true]),
            ("always_off", None, [false, false, false, false]),
            ("traceidratio", Some("0.5"), [true, false, true, true]),
            ("parentbased_always_on", None, [true, true, true, false]),
            ("parentbased_always_off", None, [false, false, true, false]),
            (
                "parentbased_traceidratio",
                Some("0.5"),
                [true, false, true, false],
            ),
        ] {
            let sampler = Sampler::parse(name, argument).unwrap();
            let found = [
                sampler.wants(low, None),
                sampler.wants(high, None),
                sampler.wants(low, caller(true)),
                sampler.wants(low, caller(false)),
            ];
            assert_eq!(found, expected, "{name}");
        }
        assert_eq!(
            Sampler::parse("parentbased_always_on", None).unwrap(),
            Sampler::default()
        );
    }

    #[test]
    fn what_is_no_sampler_is_refused() {
        assert!(Sampler::parse("jaeger_remote", None).is_err());
        for share in ["", "x", "-0.1", "1.1", "NaN"] {
            assert!(
                Sampler::parse("traceidratio", Some(share)).is_err(),
                "{share}"
            );
        }
    }
}
