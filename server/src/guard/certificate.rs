//! What a certificate says of itself. Whether it can be trusted was decided before.

use std::time::{Duration, SystemTime};

use super::der::{
    Elements, GENERALIZED_TIME, IA5_STRING, OBJECT_ID, OCTET_STRING, PRINTABLE_STRING, SEQUENCE,
    SET, UTC_TIME, UTF8_STRING,
};

const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
const ALTERNATIVE_NAMES: &[u8] = &[0x55, 0x1d, 0x11];
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;
const DNS_NAME: u8 = 0x82;
const URI: u8 = 0x86;
/// More names than any client has.
const MAX_NAMES: usize = 64;

/// A certificate's end and its subject's names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Certificate {
    pub(super) expires: SystemTime,
    /// The common name, then DNS names and URIs.
    pub(super) names: Vec<String>,
}

impl Certificate {
    /// Reads one in DER.
    pub(super) fn parse(der: &[u8]) -> Option<Self> {
        let mut body = Elements(der).enter(SEQUENCE)?.enter(SEQUENCE)?;
        let _ = body.element(VERSION);
        // Serial number, algorithm and issuer.
        body.by_ref().take(3).count();
        let mut validity = body.enter(SEQUENCE)?;
        validity.next()?;
        let (kind, end) = validity.next()?;
        let mut names = Vec::new();
        for (_, set) in body.enter(SEQUENCE)?.filter(|(tag, _)| *tag == SET) {
            let Some(mut attribute) = Elements(set).enter(SEQUENCE) else {
                continue;
            };
            if attribute.element(OBJECT_ID) != Some(COMMON_NAME) {
                continue;
            }
            if let Some((UTF8_STRING | PRINTABLE_STRING | IA5_STRING, text)) = attribute.next() {
                names.extend(std::str::from_utf8(text).map(str::to_owned));
            }
        }
        for (tag, content) in body {
            if tag == EXTENSIONS {
                names.extend(alternative_names(content));
            }
        }
        names.truncate(MAX_NAMES);
        Some(Self {
            expires: moment(kind, end)?,
            names,
        })
    }
}

fn alternative_names(extensions: &[u8]) -> Vec<String> {
    let Some(extensions) = Elements(extensions).enter(SEQUENCE) else {
        return Vec::new();
    };
    let named = extensions.filter_map(|(_, extension)| {
        let mut parts = Elements(extension);
        (parts.element(OBJECT_ID)? == ALTERNATIVE_NAMES).then_some(())?;
        let (_, value) = parts.find(|(tag, _)| *tag == OCTET_STRING)?;
        Elements(value).enter(SEQUENCE)
    });
    named
        .flatten()
        .filter(|(tag, _)| matches!(*tag, DNS_NAME | URI))
        .filter_map(|(_, name)| std::str::from_utf8(name).ok().map(str::to_owned))
        .collect()
}

/// `YYMMDDHHMMSSZ` or, with four digits for the year, the other kind.
fn moment(kind: u8, text: &[u8]) -> Option<SystemTime> {
    let digits = text.strip_suffix(b"Z")?;
    if !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = |from: usize, to: usize| -> Option<i64> {
        let digits = digits.get(from..to)?.iter();
        Some(digits.fold(0, |number, digit| number * 10 + i64::from(digit - b'0')))
    };
    let (year, at) = match kind {
        UTC_TIME => match number(0, 2)? {
            year @ 0..50 => (2000 + year, 2),
            year => (1900 + year, 2),
        },
        GENERALIZED_TIME => (number(0, 4)?, 4),
        _ => return None,
    };
    let (month, day) = (number(at, at + 2)?, number(at + 2, at + 4)?);
    let (hour, minute) = (number(at + 4, at + 6)?, number(at + 6, at + 8)?);
    let second = number(at + 8, at + 10)?;
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let seconds = days_since_1970(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    let seconds = u64::try_from(seconds).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

/// Of the Gregorian calendar; years begin in March here, so that leap days come last.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_time_are_understood() {
        let unix = |kind, text: &[u8]| {
            let moment = moment(kind, text)?;
            let since = moment.duration_since(SystemTime::UNIX_EPOCH).ok()?;
            Some(since.as_secs())
        };
        assert_eq!(unix(UTC_TIME, b"700101000000Z"), Some(0));
        assert_eq!(unix(UTC_TIME, b"000229123456Z"), Some(951_827_696));
        assert_eq!(
            unix(GENERALIZED_TIME, b"20500101000000Z"),
            Some(2_524_608_000)
        );
        assert_eq!(unix(UTC_TIME, b"701301000000Z"), None);
        assert_eq!(unix(UTC_TIME, b"7001010000Z"), None);
        assert_eq!(unix(UTC_TIME, b"7001010000-0Z"), None);
        assert_eq!(unix(SEQUENCE, b"700101000000Z"), None);
    }

    #[test]
    fn names_and_the_end_are_found() {
        let mut params = rcgen::CertificateParams::new(vec!["keda.internal".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(2051, 2, 3);
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, "keda");
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let read = Certificate::parse(certificate.der()).unwrap();
        assert_eq!(read.names.len(), 2);
        assert!(read.names.contains(&"keda".to_owned()));
        assert!(read.names.contains(&"keda.internal".to_owned()));
        let end = read.expires.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(end.as_secs(), 2_558_995_200);
        let der = certificate.der();
        for length in 0..der.len() {
            let _ = Certificate::parse(&der[..length]);
        }
    }
}
