//! The keys that tokens are checked with.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents,
    UnparsedPublicKey,
};
use ring::{hmac, signature};
use rustls::pki_types::SubjectPublicKeyInfoDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;

use crate::guard::der::{BIT_STRING, Elements, OBJECT_ID, SEQUENCE};

const MAX_KEYS: usize = 32;
/// RFC 7518: a key for HS256 is at least as long as the hash.
const LEAST_SECRET: usize = 32;
/// Shorter ones are broken.
const LEAST_MODULUS: usize = 2048 / 8;

const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01];
const ELLIPTIC: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
const P256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
const EDWARDS: &[u8] = &[0x2b, 0x65, 0x70];

/// How a token is signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    Hs256,
    Rs256,
    Es256,
    EdDsa,
}

impl Algorithm {
    pub(super) fn from_name(name: &str) -> Option<Self> {
        match name {
            "HS256" => Some(Self::Hs256),
            "RS256" => Some(Self::Rs256),
            "ES256" => Some(Self::Es256),
            "EdDSA" => Some(Self::EdDsa),
            _ => None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Hs256 => "HS256",
            Self::Rs256 => "RS256",
            Self::Es256 => "ES256",
            Self::EdDsa => "EdDSA",
        }
    }
}

/// One key, good for one algorithm.
pub(super) struct Key {
    pub(super) id: Option<String>,
    pub(super) algorithm: Algorithm,
    material: Material,
}

enum Material {
    Secret(hmac::Key),
    RsaParts { n: Vec<u8>, e: Vec<u8> },
    Public(UnparsedPublicKey<Vec<u8>>),
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key")
            .field("id", &self.id)
            .field("algorithm", &self.algorithm)
            .finish_non_exhaustive()
    }
}

impl Key {
    fn public(algorithm: Algorithm, bytes: Vec<u8>) -> Self {
        let check: &'static dyn signature::VerificationAlgorithm = match algorithm {
            Algorithm::Es256 => &ECDSA_P256_SHA256_FIXED,
            Algorithm::EdDsa => &ED25519,
            Algorithm::Rs256 | Algorithm::Hs256 => &RSA_PKCS1_2048_8192_SHA256,
        };
        Self {
            id: None,
            algorithm,
            material: Material::Public(UnparsedPublicKey::new(check, bytes)),
        }
    }

    /// Whether this key made `signature` over `message`.
    pub(super) fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        let verified = match &self.material {
            Material::Secret(key) => hmac::verify(key, message, signature),
            Material::RsaParts { n, e } => RsaPublicKeyComponents { n, e }.verify(
                &RSA_PKCS1_2048_8192_SHA256,
                message,
                signature,
            ),
            Material::Public(key) => key.verify(message, signature),
        };
        verified.is_ok()
    }
}

/// Reads keys: a set of them or one as JSON, or public keys as PEM.
pub(super) fn parse(bytes: &[u8]) -> Result<Vec<Key>, String> {
    let keys = if bytes.trim_ascii_start().starts_with(b"{") {
        parse_json(bytes)?
    } else {
        parse_pem(bytes)?
    };
    match keys.len() {
        0 => Err("it holds no key that can be used".to_owned()),
        1..=MAX_KEYS => Ok(keys),
        _ => Err(format!("more than {MAX_KEYS} keys")),
    }
}

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<serde_json::Value>,
}

#[derive(Deserialize)]
struct Jwk {
    kty: String,
    kid: Option<String>,
    alg: Option<String>,
    #[serde(rename = "use")]
    purpose: Option<String>,
    crv: Option<String>,
    k: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

fn parse_json(bytes: &[u8]) -> Result<Vec<Key>, String> {
    // The parser's words may show values, and with them secrets.
    let where_ = |error: serde_json::Error| {
        format!(
            "JSON: line {}, column {}: not a JWK or JWKS",
            error.line(),
            error.column()
        )
    };
    let document: serde_json::Value = serde_json::from_slice(bytes).map_err(where_)?;
    let entries = if document.get("keys").is_some() {
        let set: KeySet = serde_json::from_value(document).map_err(where_)?;
        set.keys
    } else {
        vec![document]
    };
    let mut keys = Vec::new();
    for (index, entry) in entries.into_iter().enumerate() {
        let named = |why: &str| format!("key {}: {why}", index + 1);
        let entry: Jwk = serde_json::from_value(entry).map_err(|_| named("it is not a JWK"))?;
        // Sets of issuers hold keys for other purposes and algorithms, too.
        if let Some(key) = read_jwk(&entry).map_err(named)? {
            keys.push(key);
        }
    }
    Ok(keys)
}

/// None for a key that is not for checking signatures by an algorithm we know.
fn read_jwk(entry: &Jwk) -> Result<Option<Key>, &'static str> {
    if entry
        .purpose
        .as_deref()
        .is_some_and(|purpose| purpose != "sig")
    {
        return Ok(None);
    }
    let part = |value: &Option<String>, lacking: &'static str| {
        let text = value.as_deref().ok_or(lacking)?;
        URL_SAFE_NO_PAD
            .decode(text.trim_end_matches('='))
            .map_err(|_| "a value is not in base64url")
    };
    let key = match (entry.kty.as_str(), entry.crv.as_deref()) {
        ("oct", _) => {
            let secret = part(&entry.k, "'k' is missing")?;
            if secret.len() < LEAST_SECRET {
                return Err("a secret for HS256 has at least 32 bytes");
            }
            Key {
                id: None,
                algorithm: Algorithm::Hs256,
                material: Material::Secret(hmac::Key::new(hmac::HMAC_SHA256, &secret)),
            }
        }
        ("RSA", _) => {
            let mut n = part(&entry.n, "'n' is missing")?;
            // Some write a leading zero, which the check does not take.
            let zeros = n.iter().take_while(|byte| **byte == 0).count();
            n.drain(..zeros);
            if n.len() < LEAST_MODULUS {
                return Err("an RSA key has at least 2048 bits");
            }
            Key {
                id: None,
                algorithm: Algorithm::Rs256,
                material: Material::RsaParts {
                    n,
                    e: part(&entry.e, "'e' is missing")?,
                },
            }
        }
        ("EC", Some("P-256")) => {
            let (x, y) = (
                part(&entry.x, "'x' is missing")?,
                part(&entry.y, "'y' is missing")?,
            );
            if x.len() != 32 || y.len() != 32 {
                return Err("'x' and 'y' have 32 bytes each");
            }
            Key::public(Algorithm::Es256, [&[4], &x[..], &y[..]].concat())
        }
        ("OKP", Some("Ed25519")) => {
            let x = part(&entry.x, "'x' is missing")?;
            if x.len() != 32 {
                return Err("'x' has 32 bytes");
            }
            Key::public(Algorithm::EdDsa, x)
        }
        _ => return Ok(None),
    };
    // A key that says it is for another algorithm is not used for this one.
    if let Some(name) = &entry.alg
        && name != key.algorithm.name()
        && !(name == "Ed25519" && key.algorithm == Algorithm::EdDsa)
    {
        return Ok(None);
    }
    Ok(Some(Key {
        id: entry.kid.clone(),
        ..key
    }))
}

fn parse_pem(bytes: &[u8]) -> Result<Vec<Key>, String> {
    let mut keys = Vec::new();
    for der in SubjectPublicKeyInfoDer::pem_slice_iter(bytes) {
        let der = der.map_err(|_| "it is neither JSON nor PEM".to_owned())?;
        let key = read_public_key(&der).ok_or_else(|| {
            format!(
                "public key {}: expected RSA of at least 2048 bits, P-256 or Ed25519",
                keys.len() + 1
            )
        })?;
        keys.push(key);
    }
    if keys.is_empty() {
        return Err("it holds neither a JWK or JWKS nor a '-----BEGIN PUBLIC KEY-----'".to_owned());
    }
    Ok(keys)
}

fn read_public_key(der: &[u8]) -> Option<Key> {
    let mut info = Elements(der).enter(SEQUENCE)?;
    let mut algorithm = info.enter(SEQUENCE)?;
    // The first byte counts unused bits: none, in keys.
    let bytes = info.element(BIT_STRING)?.strip_prefix(&[0])?;
    match algorithm.element(OBJECT_ID)? {
        RSA => {
            let (_, modulus) = Elements(bytes).enter(SEQUENCE)?.next()?;
            (modulus.len() >= LEAST_MODULUS).then(|| Key::public(Algorithm::Rs256, bytes.to_vec()))
        }
        ELLIPTIC if algorithm.element(OBJECT_ID) == Some(P256) => {
            (bytes.len() == 65).then(|| Key::public(Algorithm::Es256, bytes.to_vec()))
        }
        EDWARDS => (bytes.len() == 32).then(|| Key::public(Algorithm::EdDsa, bytes.to_vec())),
        _ => None,
    }
}
