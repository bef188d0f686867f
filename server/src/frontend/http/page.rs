//! The page at `/`: its files as they are in the repository, and what a browser may do with them.

use axum::response::Response;
use http::header::{self, HeaderMap, HeaderValue};
use http::{HeaderName, StatusCode};

use super::accepted;
use super::answer::{Answer, Failure};
use super::routes::percent_decode;
use crate::overview::OverviewQuery;

/// Nothing from anywhere else, no code in the markup, and no frame around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

struct File {
    name: &'static str,
    content_type: &'static str,
    body: &'static [u8],
}

macro_rules! files {
    ($($name:literal as $content_type:literal),* $(,)?) => {
        [$(File {
            name: $name,
            content_type: $content_type,
            body: include_bytes!(concat!("page/", $name)),
        }),*]
    };
}

const INDEX: &str = "index.html";

static FILES: [File; 12] = files![
    "index.html" as "text/html; charset=utf-8",
    "style.css" as "text/css; charset=utf-8",
    "icon.svg" as "image/svg+xml",
    "theme.js" as "text/javascript; charset=utf-8",
    "app.js" as "text/javascript; charset=utf-8",
    "api.js" as "text/javascript; charset=utf-8",
    "chart.js" as "text/javascript; charset=utf-8",
    "detail.js" as "text/javascript; charset=utf-8",
    "dom.js" as "text/javascript; charset=utf-8",
    "history.js" as "text/javascript; charset=utf-8",
    "try.js" as "text/javascript; charset=utf-8",
    "waterfall.js" as "text/javascript; charset=utf-8",
];

/// The page's file of this name, "" being the page itself.
pub(super) fn answer(name: &str, enabled: bool, headers: &HeaderMap) -> Result<Response, Failure> {
    let wanted = if name.is_empty() { INDEX } else { name };
    let file = FILES
        .iter()
        .find(|file| enabled && file.name == wanted && (name.is_empty() || wanted != INDEX));
    let Some(file) = file else {
        let why = match enabled {
            true => "no such file of the page",
            false => "the page is switched off (--page=false)",
        };
        return Err(Failure::new(StatusCode::NOT_FOUND, why));
    };
    let answer = Answer {
        content_type: file.content_type,
        ..Answer::json(file.body.to_vec())
    };
    let mut response = answer.into_response(accepted(headers, file.body.len() as u64));
    let headers = response.headers_mut();
    let secure = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        // A new version of the server has a new page.
        (header::CACHE_CONTROL, "no-cache"),
        (header::VARY, "accept-encoding"),
    ];
    for (name, value) in secure {
        headers.insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}

/// Reads `search` and `limit`; anything else is a mistake worth telling of.
pub(super) fn query(text: &str) -> Result<OverviewQuery, Failure> {
    let mut search = String::new();
    let mut limit = None;
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = percent_decode(&value.replace('+', " "));
        match (name, value) {
            ("search", Some(value)) => search = value,
            ("limit", Some(value)) => {
                limit = Some(value.parse().map_err(|_| {
                    Failure::bad_request("parameter 'limit': expected a whole number")
                })?);
            }
            ("search" | "limit", None) => {
                return Err(Failure::bad_request(format!(
                    "parameter '{name}' is not percent-encoded UTF-8"
                )));
            }
            _ => {
                let shown: String = name.chars().take(64).collect();
                return Err(Failure::bad_request(format!(
                    "unknown parameter '{}': known are search and limit",
                    shown.escape_debug()
                )));
            }
        }
    }
    Ok(OverviewQuery::new(&search, limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_served_under_a_strict_policy() {
        for file in &FILES {
            let name = if file.name == INDEX { "" } else { file.name };
            let response = answer(name, true, &HeaderMap::new()).unwrap();
            let policy = &response.headers()[header::CONTENT_SECURITY_POLICY];
            let policy = policy.to_str().unwrap();
            assert!(policy.contains("default-src 'none'"), "{policy}");
            assert!(!policy.contains("unsafe"), "{policy}");
        }
        assert!(answer("index.html", true, &HeaderMap::new()).is_err());
        assert!(answer("../page.rs", true, &HeaderMap::new()).is_err());
        assert!(answer("", false, &HeaderMap::new()).is_err());
    }

    #[test]
    fn files_refer_to_nothing_else_and_set_no_markup() {
        for file in &FILES {
            let text = std::str::from_utf8(file.body).unwrap();
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for refused in [
                "http://",
                "https://",
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "DOMParser",
            ] {
                assert!(!text.contains(refused), "{} has {refused}", file.name);
            }
        }
    }

    #[test]
    fn every_module_that_is_imported_is_served() {
        for file in &FILES {
            let text = std::str::from_utf8(file.body).unwrap();
            for part in text.split("from \"./").skip(1) {
                let name = part.split('"').next().unwrap();
                assert!(FILES.iter().any(|file| file.name == name), "{name}");
            }
        }
    }

    #[test]
    fn queries_are_read_or_refused() {
        assert_eq!(query("").unwrap(), OverviewQuery::default());
        let read = query("search=a%20b+c&limit=5").unwrap();
        assert_eq!((&*read.search, read.limit), ("a b c", 5));
        for wrong in ["limit=x", "limit=-1", "search=%ff", "serach=a"] {
            assert!(query(wrong).is_err(), "{wrong}");
        }
    }
}
