//! The file of static credentials: bearer tokens, and clients known by their certificate.

use std::collections::HashSet;
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::need::{Scope, Scopes};
use super::quota::{QuotaLimits, QuotaSection};
use super::{Client, ClientKind, GuardError, read_small_file};

const MAX_ENTRIES: usize = 1000;
const MAX_NAME: usize = 64;
/// Shorter tokens can be guessed.
const LEAST_TOKEN: usize = 16;

/// Everybody who is known by a token or a certificate.
#[derive(Debug, Default)]
pub(super) struct Credentials {
    tokens: Vec<([u8; 32], Arc<Client>)>,
    certificates: Vec<(String, Arc<Client>)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    token: Vec<TokenEntry>,
    #[serde(default)]
    certificate: Vec<CertificateEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenEntry {
    name: String,
    token: Option<String>,
    sha256: Option<String>,
    scopes: Vec<String>,
    #[serde(default)]
    quota: QuotaSection,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CertificateEntry {
    /// A common name, DNS name or URI of the certificate's subject.
    subject: String,
    name: Option<String>,
    scopes: Vec<String>,
    #[serde(default)]
    quota: QuotaSection,
}

impl Credentials {
    /// Reads the file. Who has no quota of their own gets `quotas`.
    pub(super) fn read(path: &Path, quotas: QuotaLimits) -> Result<Self, GuardError> {
        let text = read_small_file("tokens", path)?;
        let text = std::str::from_utf8(text.expose())
            .map_err(|_| wrong(path, "it is not text in UTF-8"))?;
        Self::parse(text, quotas).map_err(|why| wrong(path, why))
    }

    fn parse(text: &str, quotas: QuotaLimits) -> Result<Self, String> {
        // The parser's own words would show the lines around the error, tokens and all.
        let file: File = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| {
                text[..span.start.min(text.len())].matches('\n').count() + 1
            });
            format!("line {line}: {}", error.message())
        })?;
        if file.token.len() + file.certificate.len() > MAX_ENTRIES {
            return Err(format!("more than {MAX_ENTRIES} entries"));
        }
        let mut names = HashSet::new();
        let mut client = |kind, name: &str, scopes: &[String], quota: QuotaSection| {
            check_name(name)?;
            if !names.insert(name.to_owned()) {
                return Err(format!("two entries are named '{name}'"));
            }
            Ok(Arc::new(Client {
                kind,
                name: name.into(),
                scopes: parse_scopes(scopes).map_err(|why| format!("'{name}': {why}"))?,
                quota: quota.over(quotas),
            }))
        };
        let mut read = Self::default();
        for entry in &file.token {
            let client = client(ClientKind::Token, &entry.name, &entry.scopes, entry.quota)?;
            let digest = digest_of(entry).map_err(|why| format!("'{}': {why}", entry.name))?;
            if read.tokens.iter().any(|(known, _)| *known == digest) {
                return Err(format!("'{}': another entry has this token", entry.name));
            }
            read.tokens.push((digest, client));
        }
        for entry in file.certificate {
            let name = entry.name.as_deref().unwrap_or(&entry.subject);
            let client = client(ClientKind::Certificate, name, &entry.scopes, entry.quota)?;
            read.certificates.push((entry.subject, client));
        }
        Ok(read)
    }

    /// Who presents this token. Takes equally long for every token.
    pub(super) fn by_token(&self, token: &[u8]) -> Option<&Arc<Client>> {
        let presented: [u8; 32] = Sha256::digest(token).into();
        let mut found = None;
        for (digest, client) in &self.tokens {
            let difference = digest
                .iter()
                .zip(presented)
                .fold(0, |difference, (known, given)| difference | (known ^ given));
            if black_box(difference) == 0 {
                found = Some(client);
            }
        }
        found
    }

    /// Who has one of these names in a certificate that was checked.
    pub(super) fn by_certificate(&self, names: &[String]) -> Option<&Arc<Client>> {
        let known = self.certificates.iter();
        known
            .filter(|(subject, _)| names.contains(subject))
            .map(|(_, client)| client)
            .next()
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len() + self.certificates.len()
    }
}

fn wrong(path: &Path, why: impl Into<String>) -> GuardError {
    GuardError::File {
        what: "tokens",
        path: path.to_owned(),
        why: why.into(),
    }
}

fn check_name(name: &str) -> Result<(), String> {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@:/".contains(&byte);
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_good) {
        return Err(format!(
            "'{}' is not a name: expected up to {MAX_NAME} letters, digits and . _ - @ : /",
            name.chars()
                .take(MAX_NAME)
                .collect::<String>()
                .escape_debug()
        ));
    }
    Ok(())
}

fn parse_scopes(names: &[String]) -> Result<Scopes, String> {
    let parse = |name: &String| {
        Scope::from_name(name).ok_or_else(|| {
            let known = Scope::ALL.map(Scope::name).join(", ");
            format!("unknown scope '{}': known are {known}", name.escape_debug())
        })
    };
    names.iter().map(parse).collect()
}

fn digest_of(entry: &TokenEntry) -> Result<[u8; 32], String> {
    match (&entry.token, &entry.sha256) {
        (Some(token), None) => {
            if token.len() < LEAST_TOKEN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(format!(
                    "a token has at least {LEAST_TOKEN} visible characters and no spaces"
                ));
            }
            Ok(Sha256::digest(token.as_bytes()).into())
        }
        (None, Some(digest)) => {
            hexadecimal(digest).ok_or_else(|| "sha256 is not 64 hexadecimal digits".to_owned())
        }
        _ => Err("expected either token or sha256".to_owned()),
    }
}

fn hexadecimal(text: &str) -> Option<[u8; 32]> {
    let text = text.as_bytes();
    if text.len() != 64 {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        let digit = |at: usize| char::from(pair[at]).to_digit(16);
        *byte = (digit(0)? << 4 | digit(1)?) as u8;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        [[token]]
        name = "team-a"
        token = "0123456789abcdef"
        scopes = ["inference"]
        quota = { concurrency = 2 }

        [[token]]
        name = "ops"
        sha256 = "9F86D081884C7D659A2FEAA0C55AD015A3BF4F1B2B0B822CD15D6C15B0F00A08"
        scopes = ["dormouse:management", "metrics"]

        [[certificate]]
        subject = "keda.internal"
        scopes = ["metrics"]
    "#;

    #[test]
    fn tokens_are_known_by_value_or_by_hash() {
        let read = Credentials::parse(FILE, QuotaLimits::default()).unwrap();
        let team = read.by_token(b"0123456789abcdef").unwrap();
        assert_eq!(&*team.name, "team-a");
        assert_eq!(team.quota.concurrency, Some(2));
        assert!(team.scopes.contains(Scope::Inference));
        assert!(!team.scopes.contains(Scope::Management));
        let ops = read.by_token(b"test").unwrap();
        assert_eq!(&*ops.name, "ops");
        assert!(read.by_token(b"0123456789abcdeF").is_none());
        assert!(read.by_token(b"").is_none());
        let names = ["x".to_owned(), "keda.internal".to_owned()];
        assert_eq!(&*read.by_certificate(&names).unwrap().name, "keda.internal");
        assert!(read.by_certificate(&names[..1]).is_none());
        assert!(!format!("{read:?}").contains("0123456789abcdef"));
    }

    #[test]
    fn wrong_files_are_refused_without_showing_a_token() {
        let entry = |rest: &str| format!("[[token]]\nname = \"a\"\n{rest}\n");
        for (text, expected) in [
            (entry("scopes = []"), "either token or sha256"),
            (entry("token = 't0ps3cret'\nscopes = []"), "at least 16"),
            (entry("sha256 = 'zz'\nscopes = []"), "hexadecimal"),
            (
                entry("token = 't0ps3cret-t0ps3cret'\nscopes = ['all']"),
                "unknown scope 'all'",
            ),
            (
                entry("token = 't0ps3cret-t0ps3cret'\nscope = ['inference']"),
                "line 4: unknown field",
            ),
            (entry("token = 't0ps3cret-t0ps3cret' x"), "line 3"),
            (
                entry("token = 't0ps3cret-t0ps3cret'\nscopes = []").repeat(2),
                "two entries",
            ),
            (
                "[[token]]\nname = \"a\\nb\"\nscopes = []\n".to_owned(),
                "'a\\nb' is not a name",
            ),
        ] {
            let why = Credentials::parse(&text, QuotaLimits::default()).unwrap_err();
            assert!(why.contains(expected), "{text}: {why}");
            assert!(!why.contains("t0ps3cret"), "{why}");
        }
    }
}
