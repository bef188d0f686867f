//! JSON Web Tokens: signed by a key we were given, for us, and not expired.
//!
//! What the token says of its own algorithm is only compared with the key's: a key has one
//! algorithm, whoever signed what.

mod keys;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde_json::{Map, Value};

use self::keys::{Algorithm, Key};
use super::need::{Scope, Scopes};
use super::quota::QuotaLimits;
use super::{Client, ClientKind, GuardError, read_small_file};

/// How far the clocks of an issuer and this server may differ, in seconds.
const LEEWAY: f64 = 30.0;
const MAX_TOKEN: usize = 8 << 10;
const MAX_SUBJECT: usize = 128;

/// Whose tokens are accepted, and for whom they must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JwtConfig {
    /// A JWKS or JWK as JSON, or public keys as PEM.
    pub keys: PathBuf,
    /// One of these must be among the token's.
    pub audiences: Vec<String>,
    pub issuer: Option<String>,
    /// The claim with the scopes: a list, or words in a text.
    pub scope_claim: String,
}

/// Checks tokens.
#[derive(Debug)]
pub(super) struct Verifier {
    config: JwtConfig,
    keys: Vec<Key>,
    quotas: QuotaLimits,
}

/// Why a token is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum JwtError {
    #[error("it is not a signed JSON web token")]
    Malformed,
    #[error("no key of this server's matches its algorithm and key id")]
    NoKey,
    #[error("its signature is wrong")]
    Signature,
    #[error("it says no time of expiry")]
    NoExpiry,
    #[error("it has expired")]
    Expired,
    #[error("it is not valid yet")]
    Early,
    #[error("it is for another audience")]
    Audience,
    #[error("it is from another issuer")]
    Issuer,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    /// Extensions that must be understood; we understand none.
    crit: Option<Value>,
}

impl Verifier {
    /// Reads the keys.
    pub(super) fn read(config: &JwtConfig, quotas: QuotaLimits) -> Result<Self, GuardError> {
        let path: &Path = &config.keys;
        let text = read_small_file("JWT keys", path)?;
        let keys = keys::parse(text.expose()).map_err(|why| GuardError::File {
            what: "JWT keys",
            path: path.to_owned(),
            why,
        })?;
        Ok(Self {
            config: config.clone(),
            keys,
            quotas,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether something could be meant as such a token.
    pub(super) fn looks_like_one(token: &str) -> bool {
        token.bytes().filter(|byte| *byte == b'.').count() == 2
    }

    /// Who the bearer is, at `now` in Unix time.
    pub(super) fn verify(&self, token: &str, now: f64) -> Result<Arc<Client>, JwtError> {
        if token.len() > MAX_TOKEN {
            return Err(JwtError::Malformed);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(JwtError::Malformed)?;
        let (header, payload) = signed.split_once('.').ok_or(JwtError::Malformed)?;
        let decode = |text: &str| {
            let bytes = URL_SAFE_NO_PAD.decode(text);
            bytes.map_err(|_| JwtError::Malformed)
        };
        let header: Header =
            serde_json::from_slice(&decode(header)?).map_err(|_| JwtError::Malformed)?;
        if header.crit.is_some() {
            return Err(JwtError::Malformed);
        }
        let algorithm = Algorithm::from_name(&header.alg).ok_or(JwtError::NoKey)?;
        let signature = decode(signature)?;
        self.check_signature(algorithm, header.kid.as_deref(), signed, &signature)?;
        let claims: Map<String, Value> =
            serde_json::from_slice(&decode(payload)?).map_err(|_| JwtError::Malformed)?;
        self.check_claims(&claims, now)?;
        let subject = claims.get("sub").and_then(Value::as_str).unwrap_or("jwt");
        let subject: String = subject.chars().take(MAX_SUBJECT).collect();
        Ok(Arc::new(Client {
            kind: ClientKind::Jwt,
            name: subject.into(),
            scopes: scopes(claims.get(&self.config.scope_claim)),
            quota: self.quotas,
        }))
    }

    fn check_signature(
        &self,
        algorithm: Algorithm,
        id: Option<&str>,
        signed: &str,
        signature: &[u8],
    ) -> Result<(), JwtError> {
        let is_candidate = |key: &&Key| {
            let is_meant = match (id, key.id.as_deref()) {
                (Some(wanted), Some(id)) => wanted == id,
                // A key without a name, or a token that names none: the signature decides.
                (None, _) | (_, None) => true,
            };
            key.algorithm == algorithm && is_meant
        };
        let mut candidates = self.keys.iter().filter(is_candidate).peekable();
        if candidates.peek().is_none() {
            return Err(JwtError::NoKey);
        }
        match candidates.any(|key| key.has_signed(signed.as_bytes(), signature)) {
            true => Ok(()),
            false => Err(JwtError::Signature),
        }
    }

    fn check_claims(&self, claims: &Map<String, Value>, now: f64) -> Result<(), JwtError> {
        let moment = |name: &str| match claims.get(name) {
            None => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or(JwtError::Malformed),
        };
        let expiry = moment("exp")?.ok_or(JwtError::NoExpiry)?;
        if now >= expiry + LEEWAY {
            return Err(JwtError::Expired);
        }
        if moment("nbf")?.is_some_and(|start| now < start - LEEWAY) {
            return Err(JwtError::Early);
        }
        let is_us = |value: &Value| {
            let audience = value.as_str();
            audience.is_some_and(|name| self.config.audiences.iter().any(|ours| ours == name))
        };
        let is_for_us = match claims.get("aud") {
            Some(Value::Array(audiences)) => audiences.iter().any(is_us),
            Some(audience) => is_us(audience),
            None => false,
        };
        if !is_for_us {
            return Err(JwtError::Audience);
        }
        let issuer = claims.get("iss").and_then(Value::as_str);
        if self.config.issuer.is_some() && issuer != self.config.issuer.as_deref() {
            return Err(JwtError::Issuer);
        }
        Ok(())
    }
}

/// The scopes of a claim that are ours; others mean something elsewhere.
fn scopes(claim: Option<&Value>) -> Scopes {
    match claim {
        Some(Value::String(text)) => text
            .split_ascii_whitespace()
            .filter_map(Scope::from_name)
            .collect(),
        Some(Value::Array(names)) => {
            let names = names.iter().filter_map(Value::as_str);
            names.filter_map(Scope::from_name).collect()
        }
        _ => Scopes::default(),
    }
}

#[cfg(test)]
mod tests;
