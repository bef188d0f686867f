use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};

use super::*;

const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";
const NOW: f64 = 1_000.0;

fn base64(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn verifier(keys: &str) -> Verifier {
    Verifier {
        config: JwtConfig {
            keys: PathBuf::new(),
            audiences: vec!["dormouse".to_owned(), "also-us".to_owned()],
            issuer: Some("https://issuer".to_owned()),
            scope_claim: "scope".to_owned(),
        },
        keys: keys::parse(keys.as_bytes()).unwrap(),
        quotas: QuotaLimits::default(),
    }
}

fn secret_key() -> String {
    json!({"keys": [{"kty": "oct", "kid": "s1", "k": base64(SECRET)}]}).to_string()
}

fn signed(header: &Value, claims: &Value, sign: impl FnOnce(&[u8]) -> Vec<u8>) -> String {
    let text = format!(
        "{}.{}",
        base64(header.to_string()),
        base64(claims.to_string())
    );
    let signature = sign(text.as_bytes());
    format!("{text}.{}", base64(signature))
}

fn by_secret(message: &[u8]) -> Vec<u8> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET);
    hmac::sign(&key, message).as_ref().to_vec()
}

fn good_claims() -> Value {
    json!({
        "sub": "alice", "aud": "dormouse", "iss": "https://issuer",
        "exp": 2000, "nbf": 900, "scope": "openid dormouse:inference",
    })
}

#[test]
fn a_good_token_says_who_and_what_for() {
    let verifier = verifier(&secret_key());
    for header in [
        json!({"alg": "HS256", "kid": "s1"}),
        json!({"alg": "HS256"}),
    ] {
        let token = signed(&header, &good_claims(), by_secret);
        let client = verifier.verify(&token, NOW).unwrap();
        assert_eq!(&*client.name, "alice");
        assert!(client.scopes.contains(Scope::Inference));
        assert!(!client.scopes.contains(Scope::Management));
    }
}

#[test]
fn every_claim_is_checked() {
    let verifier = verifier(&secret_key());
    let header = json!({"alg": "HS256"});
    let check = |claim: &str, value: Value| {
        let mut claims = good_claims();
        match value {
            Value::Null => {
                claims.as_object_mut().unwrap().remove(claim);
            }
            value => claims[claim] = value,
        }
        let token = signed(&header, &claims, by_secret);
        verifier.verify(&token, NOW).map(|_| ()).err()
    };
    for (claim, value, expected) in [
        ("exp", Value::Null, Some(JwtError::NoExpiry)),
        ("exp", json!("soon"), Some(JwtError::Malformed)),
        ("exp", json!(970), Some(JwtError::Expired)),
        ("exp", json!(970.5), None),
        ("nbf", json!(1031), Some(JwtError::Early)),
        ("nbf", json!(1030), None),
        ("nbf", Value::Null, None),
        ("aud", Value::Null, Some(JwtError::Audience)),
        ("aud", json!("others"), Some(JwtError::Audience)),
        ("aud", json!([]), Some(JwtError::Audience)),
        ("aud", json!({"a": "dormouse"}), Some(JwtError::Audience)),
        ("aud", json!(["others", "also-us"]), None),
        ("iss", json!("https://other"), Some(JwtError::Issuer)),
        ("iss", Value::Null, Some(JwtError::Issuer)),
        ("sub", Value::Null, None),
    ] {
        assert_eq!(check(claim, value.clone()), expected, "{claim} {value}");
    }
}

#[test]
fn scopes_come_as_words_or_as_a_list() {
    let both: Scopes = [Scope::Inference, Scope::Metrics].into_iter().collect();
    assert_eq!(scopes(Some(&json!("metrics  inference x"))), both);
    assert_eq!(scopes(Some(&json!(["metrics", 3, "inference"]))), both);
    assert!(scopes(Some(&json!(7))).is_empty());
    assert!(scopes(None).is_empty());
}

#[test]
fn other_signatures_and_algorithms_are_refused() {
    let verifier = verifier(&secret_key());
    let refused = |header: Value, sign: fn(&[u8]) -> Vec<u8>| {
        let token = signed(&header, &good_claims(), sign);
        verifier.verify(&token, NOW).unwrap_err()
    };
    let nothing = |_: &[u8]| Vec::new();
    assert_eq!(refused(json!({"alg": "none"}), nothing), JwtError::NoKey);
    assert_eq!(refused(json!({"alg": "NONE"}), nothing), JwtError::NoKey);
    assert_eq!(refused(json!({"alg": "HS512"}), by_secret), JwtError::NoKey);
    assert_eq!(
        refused(json!({"alg": "HS256"}), nothing),
        JwtError::Signature
    );
    let other = json!({"alg": "HS256", "kid": "s2"});
    assert_eq!(refused(other, by_secret), JwtError::NoKey);
    let critical = json!({"alg": "HS256", "crit": ["b64"], "b64": false});
    assert_eq!(refused(critical, by_secret), JwtError::Malformed);
    let token = signed(&json!({"alg": "HS256"}), &good_claims(), by_secret);
    let (signed, signature) = token.rsplit_once('.').unwrap();
    let (header, _) = signed.split_once('.').unwrap();
    let mut claims = good_claims();
    claims["scope"] = json!("management");
    let forged = format!("{header}.{}.{signature}", base64(claims.to_string()));
    assert_eq!(
        verifier.verify(&forged, NOW).unwrap_err(),
        JwtError::Signature
    );
    for broken in ["", ".", "..", "a.b.c", "e30.e30.", "=.=.=", &token[1..]] {
        assert!(verifier.verify(broken, NOW).is_err(), "{broken}");
    }
    let long = format!("{token}{}", "A".repeat(MAX_TOKEN));
    assert_eq!(
        verifier.verify(&long, NOW).unwrap_err(),
        JwtError::Malformed
    );
}

#[test]
fn a_public_key_is_no_secret_to_sign_with() {
    let verifier = verifier(RSA_PEM);
    let token = signed(&json!({"alg": "HS256"}), &good_claims(), |message| {
        let key = hmac::Key::new(hmac::HMAC_SHA256, RSA_PEM.as_bytes());
        hmac::sign(&key, message).as_ref().to_vec()
    });
    assert_eq!(verifier.verify(&token, NOW).unwrap_err(), JwtError::NoKey);
}

#[test]
fn rsa_keys_are_read_from_pem_and_jwks() {
    let set = json!({"keys": [
        {"kty": "RSA", "use": "enc", "kid": "r1", "n": "AQAB", "e": "AQAB"},
        {"kty": "RSA", "use": "sig", "alg": "PS256", "kid": "r1", "n": RSA_MODULUS, "e": "AQAB"},
        {"kty": "EC", "crv": "P-521", "x": "", "y": ""},
        {"kty": "RSA", "use": "sig", "kid": "r1", "alg": "RS256", "n": RSA_MODULUS, "e": "AQAB"},
    ]});
    for keys in [RSA_PEM.to_owned(), set.to_string()] {
        let mut verifier = verifier(&keys);
        assert_eq!(verifier.len(), 1);
        verifier.config.issuer = None;
        let client = verifier.verify(RSA_TOKEN, NOW - 1.0).unwrap();
        assert_eq!(&*client.name, "rsa");
        let mut other = RSA_TOKEN.to_owned();
        other.replace_range(other.len() - 9..other.len() - 8, "_");
        assert_eq!(
            verifier.verify(&other, NOW).unwrap_err(),
            JwtError::Signature
        );
    }
}

#[test]
fn elliptic_keys_are_read_from_pem_and_jwks() {
    let random = SystemRandom::new();
    let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, pkcs8.as_ref(), &random)
        .unwrap();
    let point = pair.public_key().as_ref();
    let jwk = json!({
        "kty": "EC", "crv": "P-256", "x": base64(&point[1..33]), "y": base64(&point[33..]),
    });
    let pem = rcgen::KeyPair::try_from(pkcs8.as_ref()).unwrap();
    for keys in [jwk.to_string(), pem.public_key_pem()] {
        let token = signed(&json!({"alg": "ES256"}), &good_claims(), |message| {
            pair.sign(&random, message).unwrap().as_ref().to_vec()
        });
        assert!(verifier(&keys).verify(&token, NOW).is_ok());
    }

    let pkcs8 = Ed25519KeyPair::generate_pkcs8(&random).unwrap();
    let pair = Ed25519KeyPair::from_pkcs8(pkcs8.as_ref()).unwrap();
    let jwk = json!({"kty": "OKP", "crv": "Ed25519", "x": base64(pair.public_key())});
    let pem = rcgen::KeyPair::try_from(pkcs8.as_ref()).unwrap();
    for keys in [jwk.to_string(), pem.public_key_pem()] {
        let token = signed(&json!({"alg": "EdDSA"}), &good_claims(), |message| {
            pair.sign(message).as_ref().to_vec()
        });
        assert!(verifier(&keys).verify(&token, NOW).is_ok());
        let named = token.replacen(
            &base64(json!({"alg": "EdDSA"}).to_string()),
            &base64(json!({"alg": "ES256"}).to_string()),
            1,
        );
        assert_eq!(
            verifier(&keys).verify(&named, NOW).unwrap_err(),
            JwtError::NoKey
        );
    }
}

#[test]
fn files_without_a_usable_key_are_refused_without_showing_one() {
    for (text, expected) in [
        ("".to_owned(), "neither a JWK"),
        ("t0ps3cret".to_owned(), "neither a JWK"),
        ("{".to_owned(), "line 1"),
        (json!({"keys": []}).to_string(), "no key that can be used"),
        (
            json!({"kty": "oct", "k": base64("t0ps3cret")}).to_string(),
            "at least 32 bytes",
        ),
        (
            json!({"kty": "RSA", "n": base64([1; 128]), "e": "AQAB"}).to_string(),
            "2048 bits",
        ),
        (
            json!({"kty": "RSA", "n": "!", "e": "AQAB"}).to_string(),
            "base64url",
        ),
        (
            json!({"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}).to_string(),
            "32 bytes",
        ),
        (json!({"kid": "x"}).to_string(), "it is not a JWK"),
    ] {
        let why = keys::parse(text.as_bytes()).unwrap_err();
        assert!(why.contains(expected), "{text}: {why}");
        assert!(!why.contains("t0ps3cret"), "{why}");
    }
}

const RSA_PEM: &str = "-----BEGIN PUBLIC KEY-----\n\
MIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8AMIIBCgKCAQEApZoYLqlxGhnohHltAz/X\n\
IJkx3Ij5OPAEcLgCD9T3JFR1VlGUZMCFi/fLtdMLek9dQrwKcApnCUnjkz80LYCE\n\
MNfxG5LzjSeBDh0ZJ73syUeHzYxA5EBUj6KSyFvyAOhOF8kgO30yMtpdCf4S9BOL\n\
LUWjjmsxZ8rYtVnqmDiAZ9RAHmTKIrNQUAJd/zKorUh84a2rcRL0biQ2/iTxfJIt\n\
o8QRYxiHOIXk7NgI7bbnDDxbikIuddkX0lzVX3yAGhKX0uVThmWB59binGXy/QDE\n\
wna60S/m/5L+gc4z1u0bdJmmerVLgsHG5WdsYKWIbEM4M2H2QZyuY7Z4S1MgQiw5\n\
jwIDAQAB\n\
-----END PUBLIC KEY-----\n";
const RSA_MODULUS: &str = "pZoYLqlxGhnohHltAz_XIJkx3Ij5OPAEcLgCD9T3JFR1VlGUZMCFi_fLtdMLek9dQrwKcApnCUnjkz80LYCEMNfxG5LzjSeBDh0ZJ73syUeHzYxA5EBUj6KSyFvyAOhOF8kgO30yMtpdCf4S9BOLLUWjjmsxZ8rYtVnqmDiAZ9RAHmTKIrNQUAJd_zKorUh84a2rcRL0biQ2_iTxfJIto8QRYxiHOIXk7NgI7bbnDDxbikIuddkX0lzVX3yAGhKX0uVThmWB59binGXy_QDEwna60S_m_5L-gc4z1u0bdJmmerVLgsHG5WdsYKWIbEM4M2H2QZyuY7Z4S1MgQiw5jw";
const RSA_TOKEN: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6InIxIn0.eyJhdWQiOiJkb3Jtb3VzZSIsImV4cCI6MTAwMCwic3ViIjoicnNhIiwic2NvcGUiOiJpbmZlcmVuY2UifQ.hKEyv9oisv7eXvYdFekyxrP03By6fNzVsT5KOpFbweJiTRO6qmQ20tsolXzdM6ftlIBqeM-bc0qS5HofS74-7m1HjVi6hq9PG1HhVowEZ94vgiLHpXBgFQCQEiCpQGYBsw27jZbt-9PEgsCW93Z40Tlhj3mu55rAZoqpXpapRobXdJ5vRdxbDSeyrLnx4B7bKVPo2ga_iMoMnvxGvLted8CaPUYrX2os0ul30wNApd5iC2-jusf9rLt3stlM5aQVP9Ng_Rnc4_LyMfjrcn2vZKwUtGPixbn1lJBLFAUYUhCz6WdfxwyHtm4KojwJmRf2ydHZI4C04GmOmeZ6GWT-OQ";
