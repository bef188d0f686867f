//! The description of the HTTP API in OpenAPI 3.1, kept beside what it describes.

/// The document at `/openapi.json`.
pub(super) static DOCUMENT: &[u8] = include_bytes!("openapi/openapi.json");

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use http::{Method, StatusCode};
    use serde_json::Value;

    use super::*;
    use crate::frontend::http::routes::{self, Access, Route};

    /// What the description calls a route. A new kind of route does not compile without a name
    /// here, and fails below without a description.
    fn operation(route: &Route) -> &'static str {
        match route {
            Route::ServerMetadata => "serverMetadata",
            Route::Live => "serverLive",
            Route::Ready => "serverReady",
            Route::ModelMetadata(_) => "modelMetadata",
            Route::ModelReady(_) => "modelReady",
            Route::ModelConfig(_) => "modelConfig",
            Route::Statistics(model) if model.name.is_empty() => "allStatistics",
            Route::Statistics(_) => "modelStatistics",
            Route::Infer(_) => "infer",
            Route::Index => "repositoryIndex",
            Route::Load(_) => "loadModel",
            Route::Unload(_) => "unloadModel",
            Route::LogSettings(Access::Read) => "logSettings",
            Route::LogSettings(Access::Change) => "changeLogSettings",
            Route::TraceSettings(_, Access::Read) => "traceSettings",
            Route::TraceSettings(_, Access::Change) => "changeTraceSettings",
            Route::RegionStatus(..) => "regionStatus",
            Route::RegisterRegion(..) => "registerRegion",
            Route::UnregisterRegion(..) => "unregisterRegion",
            Route::Models => "listModels",
            Route::Overview => "overview",
            Route::OpenApi => "openapi",
            Route::Page(name) if name.is_empty() => "page",
            Route::Page(_) => "pageFile",
            Route::Unsupported(_) => "unsupported",
        }
    }

    const OPERATIONS: [&str; 25] = [
        "serverMetadata",
        "serverLive",
        "serverReady",
        "modelMetadata",
        "modelReady",
        "modelConfig",
        "allStatistics",
        "modelStatistics",
        "infer",
        "repositoryIndex",
        "loadModel",
        "unloadModel",
        "logSettings",
        "changeLogSettings",
        "traceSettings",
        "changeTraceSettings",
        "regionStatus",
        "registerRegion",
        "unregisterRegion",
        "listModels",
        "overview",
        "openapi",
        "page",
        "pageFile",
        "unsupported",
    ];

    fn document() -> Value {
        serde_json::from_slice(DOCUMENT).unwrap()
    }

    /// Every described operation: its method and a path that has it.
    fn operations(document: &Value) -> BTreeMap<(String, String), Value> {
        let mut found = BTreeMap::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            let place = path
                .replace("{model}", "m")
                .replace("{version}", "1")
                .replace("{repository}", "r")
                .replace("{region}", "g")
                .replace("{file}", "app.js");
            assert!(!place.contains('{'), "{path}: an unknown parameter");
            for (method, operation) in item.as_object().unwrap() {
                if method != "parameters" {
                    let key = (place.clone(), method.to_uppercase());
                    assert!(found.insert(key, operation.clone()).is_none(), "{path}");
                }
            }
        }
        found
    }

    #[test]
    fn what_is_described_is_routed_and_what_is_not_is_not() {
        let document = document();
        let described = operations(&document);
        let paths: BTreeSet<&String> = described.keys().map(|(path, _)| path).collect();
        let mut seen = BTreeSet::new();
        for path in paths {
            for method in [
                Method::GET,
                Method::POST,
                Method::PUT,
                Method::PATCH,
                Method::DELETE,
            ] {
                let operation_here = described.get(&(path.clone(), method.to_string()));
                match (routes::find(&method, path), operation_here) {
                    (Ok(route), Some(described)) => {
                        let name = operation(&route);
                        let id = described["operationId"].as_str().unwrap();
                        let id = id.strip_suffix("OfVersion").unwrap_or(id);
                        let id = id.strip_suffix("OfModel").unwrap_or(id);
                        let id = match id {
                            "namedRepositoryIndex" => "repositoryIndex",
                            "systemRegionsStatus"
                            | "systemRegionStatus"
                            | "cudaRegionsStatus"
                            | "cudaRegionStatus" => "regionStatus",
                            "registerSystemRegion" | "registerCudaRegion" => "registerRegion",
                            "unregisterSystemRegion"
                            | "unregisterSystemRegions"
                            | "unregisterCudaRegion"
                            | "unregisterCudaRegions" => "unregisterRegion",
                            _ if described["tags"][0] == "not supported" => "unsupported",
                            id => id,
                        };
                        assert_eq!(name, id, "{method} {path}");
                        seen.insert(name);
                    }
                    (Err(failure), None) => {
                        let status = failure.status;
                        assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
                    }
                    (Ok(_), None) => panic!("{method} {path} is served and not described"),
                    (Err(_), Some(_)) => panic!("{method} {path} is described and not served"),
                }
            }
        }
        assert_eq!(seen, OPERATIONS.into_iter().collect());
    }

    #[test]
    fn every_reference_leads_somewhere_and_every_id_is_one_operations() {
        fn walk<'a>(value: &'a Value, visit: &mut impl FnMut(&'a str, &'a Value)) {
            match value {
                Value::Object(fields) => {
                    for (name, value) in fields {
                        visit(name, value);
                        walk(value, visit);
                    }
                }
                Value::Array(values) => values.iter().for_each(|value| walk(value, visit)),
                _ => {}
            }
        }
        let document = document();
        let mut used = BTreeSet::new();
        let mut ids = Vec::new();
        walk(&document, &mut |name, value| match name {
            "$ref" => {
                used.insert(value.as_str().unwrap());
            }
            "operationId" => ids.push(value.as_str().unwrap()),
            _ => {}
        });
        for reference in &used {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
        for kind in ["schemas", "responses", "parameters"] {
            for name in document["components"][kind].as_object().unwrap().keys() {
                let reference = format!("#/components/{kind}/{name}");
                assert!(used.contains(reference.as_str()), "{reference} is not used");
            }
        }
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
        assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    }
}
