//! Names and sizes.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A model's version: the name of a numeric folder, without leading zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u64);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One version of one model: what is loaded, run and counted as a unit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId {
    pub name: Arc<str>,
    pub version: Version,
}

impl ModelId {
    pub fn new(name: impl Into<Arc<str>>, version: u64) -> Self {
        Self {
            name: name.into(),
            version: Version(version),
        }
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' version {}", self.name, self.version)
    }
}

/// A number of bytes; written and read as `512`, `64MiB`, `2GiB`, `10MB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

impl ByteSize {
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        let (unit, divisor) = match bytes {
            0..1024 => return write!(f, "{bytes} B"),
            1024..1_048_576 => ("KiB", 1024.0),
            1_048_576..1_073_741_824 => ("MiB", 1_048_576.0),
            _ => ("GiB", 1_073_741_824.0),
        };
        write!(f, "{:.1} {unit}", bytes as f64 / divisor)
    }
}

/// A size that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a size: expected a whole number with an optional unit (B, KB, MB, GB, KiB, MiB, GiB)"
)]
pub struct InvalidByteSize(String);

impl FromStr for ByteSize {
    type Err = InvalidByteSize;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidByteSize(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(trimmed.len());
        let number: u64 = trimmed[..digits].parse().map_err(|_| invalid())?;
        let factor: u64 = match trimmed[digits..].trim() {
            "" | "B" => 1,
            "KB" => 1_000,
            "MB" => 1_000_000,
            "GB" => 1_000_000_000,
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            _ => return Err(invalid()),
        };
        number.checked_mul(factor).map(Self).ok_or_else(invalid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_written_in_configs() {
        assert_eq!("64MiB".parse(), Ok(ByteSize::mib(64)));
        assert_eq!("2 GiB".parse(), Ok(ByteSize::gib(2)));
        assert_eq!("10MB".parse(), Ok(ByteSize(10_000_000)));
        assert_eq!("512".parse(), Ok(ByteSize(512)));
        assert!("".parse::<ByteSize>().is_err());
        assert!("-1".parse::<ByteSize>().is_err());
        assert!("99999999999999GiB".parse::<ByteSize>().is_err());
    }
}
