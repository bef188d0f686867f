use super::*;

const SHORTEST: &str = "name = \"x\"\nmode = \"closed\"\n[[models]]\nname = \"m\"\n";

fn complaint(text: &str) -> String {
    format!("{:#}", Scenario::parse(text).unwrap_err())
}

#[test]
fn the_shortest_scenario_is_complete() {
    let scenario = Scenario::parse(SHORTEST).unwrap();
    let mut wanted = Scenario::closed("m", &[1, 8, 32]);
    wanted.name = "x".to_owned();
    assert_eq!(scenario, wanted);
}

#[test]
fn unknown_keys_are_refused_with_their_line() {
    for (text, line, key) in [
        (format!("naem = 1\n{SHORTEST}"), "line 1", "naem"),
        (format!("{SHORTEST}wieght = 2.0\n"), "line 5", "wieght"),
        (format!("{SHORTEST}[open]\nrate = 3\n"), "line 6", "rate"),
        (
            format!("{SHORTEST}cancel = {{ fraction = 0.1, after = \"1s\", when = 2 }}\n"),
            "line 5",
            "when",
        ),
    ] {
        let error = complaint(&text);
        assert!(error.contains(line) && error.contains(key), "{error}");
    }
}

#[test]
fn values_that_make_no_sense_are_named() {
    for (extra, words) in [
        ("weight = 0.0", "models[0] 'm': weight"),
        ("deadline = \"soon\"", "\"soon\" is not a duration"),
        ("shapes = { X = [\"5..2\"] }", "not a range"),
        ("shapes = { X = [-1] }", "not a size"),
        ("shapes = { X = [[]] }", "at least one"),
        ("values = { X = [2.0, 1.0] }", "values.X"),
        (
            "shapes = { X = [1, \"L\"] }",
            "shapes.X: 'L' is not one of dims; there are none",
        ),
        (
            "shapes = { X = [\"N\", \"M\"] }\ndims = { L = 2, N = 1 }",
            "dims.L: no shape names it",
        ),
        (
            "shapes = { X = [\"N\", \"M\"] }\ndims = { N = 1 }",
            "shapes.X: 'M' is not one of dims; they are N",
        ),
        (
            "shapes = { X = [\"N\"] }\ndims = { N = \"M\" }",
            "not another name",
        ),
        (
            "dims = { \"1\" = 1 }",
            "dims.1: a name begins with a letter",
        ),
        (
            "dims = { L = { median = 9, sigma = 1 } }",
            "missing field `to`",
        ),
        ("expected = \"y.json\"", "recorded request"),
        ("order = \"any\"", "unknown variant `any`"),
        ("check = \"never\"", "unknown variant `never`"),
        ("cancel = { fraction = 2.0, after = \"1s\" }", "fraction"),
    ] {
        let error = complaint(&format!("{SHORTEST}{extra}\n"));
        assert!(error.contains(words), "{extra}: {error}");
    }
    for (change, words) in [
        ("mode = \"open\"\nopen.arrivals = \"bursts\"", "open.bursts"),
        ("mode = \"open\"\nopen.arrivals = \"trace\"", "open.trace"),
        ("mode = \"open\"\nopen.rates = []", "open.rates"),
        ("mode = \"closed\"\nduration = \"0s\"", "duration"),
        ("mode = \"closed\"\nwindow = \"1ms\"", "window"),
        ("mode = \"cold\"\ncold.repetitions = 0", "cold.repetitions"),
    ] {
        let error = complaint(&SHORTEST.replace("mode = \"closed\"", change));
        assert!(error.contains(words), "{change}: {error}");
    }
}

#[test]
fn scenarios_survive_being_written_and_read() {
    for path in files() {
        let scenario = Scenario::open(&path).unwrap();
        let text = serde_json::to_string(&scenario).unwrap();
        let again: Scenario = serde_json::from_str(&text).unwrap();
        assert_eq!(again, scenario);
        let text = toml::to_string(&scenario).unwrap();
        assert_eq!(Scenario::parse(&text).unwrap(), scenario);
    }
}

/// The scenarios that come with the program.
pub(in crate::drive) fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "toml"))
        .collect();
    files.sort_unstable();
    assert_eq!(files.len(), 9);
    files
}
