//! What a request needs to be allowed to do, and what a credential allows.

use std::fmt;

/// What a credential may be good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Running models.
    Inference,
    /// Loading and unloading models, and changing settings.
    Management,
    /// Reading metrics and the load that autoscalers ask for.
    Metrics,
}

impl Scope {
    pub const ALL: [Self; 3] = [Self::Inference, Self::Management, Self::Metrics];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Inference => "inference",
            Self::Management => "management",
            Self::Metrics => "metrics",
        }
    }

    /// A scope by its name, alone or as `dormouse:NAME`, as issuers of many services write it.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix("dormouse:").unwrap_or(name);
        Self::ALL.into_iter().find(|scope| scope.name() == name)
    }
}

/// A set of scopes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Scopes(u8);

impl Scopes {
    pub const ALL: Self = Self(0b111);

    pub fn contains(self, scope: Scope) -> bool {
        self.0 & 1 << scope as u8 != 0
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl FromIterator<Scope> for Scopes {
    fn from_iter<I: IntoIterator<Item = Scope>>(scopes: I) -> Self {
        let bits = scopes.into_iter().map(|scope| 1 << scope as u8);
        Self(bits.fold(0, |all, bit| all | bit))
    }
}

impl fmt::Debug for Scopes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = Scope::ALL.into_iter().filter(|scope| self.contains(*scope));
        f.debug_set().entries(held.map(Scope::name)).finish()
    }
}

/// What a route or call needs. Every one has exactly one of these beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Liveness and readiness of the server: open to everybody unless configured otherwise.
    Probe,
    /// The files of the page, which are the same on every server: a browser cannot show a token
    /// before it has them.
    Page,
    /// Reading about the server and its models: a credential with any scope.
    Metadata,
    Inference,
    /// Registering memory of other programs, which inference then reads and writes.
    SharedMemory,
    /// One call with many requests, each of which counts for itself.
    InferenceStream,
    Management,
    /// Management that loads a model, which the quota of loads counts.
    Load,
    Metrics,
    /// There is nothing here; only who is known is told so.
    Unknown,
}

impl Need {
    /// Whether `scopes` are enough.
    pub(super) fn is_met_by(self, scopes: Scopes) -> bool {
        match self {
            Self::Probe | Self::Page | Self::Unknown => true,
            Self::Metadata => !scopes.is_empty(),
            Self::Inference | Self::InferenceStream | Self::SharedMemory => {
                scopes.contains(Scope::Inference)
            }
            Self::Management | Self::Load => scopes.contains(Scope::Management),
            Self::Metrics => scopes.contains(Scope::Metrics),
        }
    }

    /// What would be enough, in words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Probe | Self::Page => "open",
            Self::Metadata => "any scope",
            Self::Inference | Self::InferenceStream | Self::SharedMemory => "inference",
            Self::Management | Self::Load => "management",
            Self::Metrics => "metrics",
            Self::Unknown => "a credential",
        }
    }

    pub(super) fn is_management(self) -> bool {
        matches!(self, Self::Management | Self::Load)
    }

    pub(super) fn is_inference(self) -> bool {
        matches!(
            self,
            Self::Inference | Self::InferenceStream | Self::SharedMemory
        )
    }

    /// Whether it changes more than what a request is answered: a browser must not be talked into
    /// that by somebody else's page.
    pub(super) fn reaches_beyond_models(self) -> bool {
        self.is_management() || self == Self::SharedMemory
    }

    /// Whether a quota of requests counts it: who watches the server is never turned away.
    pub(super) fn is_counted(self) -> bool {
        !matches!(self, Self::Probe | Self::Metrics)
    }
}
