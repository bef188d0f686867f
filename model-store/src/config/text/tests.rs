use dormouse_proto::inference as pb;
use proptest::prelude::*;

use super::parse;

fn name_of(text: &str) -> String {
    parse(text)
        .unwrap_or_else(|error| panic!("{text}: {error}"))
        .name
}

fn refusal(text: &str) -> String {
    match parse(text) {
        Ok(config) => panic!("{text:?} was read as {config:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn the_usual_spelling_is_read() {
    let config = parse(
        r#"
        # A comment, and "quotes: [" in it.
        name: "resnet" platform: 'onnxruntime_onnx'; max_batch_size: 8,
        input [ { name: "x", data_type: TYPE_FP32 dims: [ 3, -1, 0x10 ] } ]
        output: < name: "y" data_type: 11 dims: 1000 dims: 010 >
        parameters { key: "k" value: { string_value: "a" 'b' } }
        parameters: [ { value { string_value: "" } key: "l" } ]
        response_cache { enable: True }
        "#,
    )
    .unwrap();
    assert_eq!(config.name, "resnet");
    assert_eq!(config.max_batch_size, 8);
    assert_eq!(config.input[0].dims, [3, -1, 16]);
    assert_eq!(config.output[0].data_type(), pb::DataType::TypeFp32);
    assert_eq!(config.output[0].dims, [1000, 8]);
    assert_eq!(config.parameters["k"].string_value, "ab");
    assert_eq!(config.parameters["l"].string_value, "");
    assert!(config.response_cache.unwrap().enable);
}

#[test]
fn strings_take_every_escape_of_the_format() {
    assert_eq!(
        name_of(r#"name: "\a\b\f\n\r\t\v\?\\\'\"\x41\X42\103\u00e9\U0001f600\ud83d\ude00""#),
        "\x07\x08\x0c\n\r\t\x0b?\\'\"ABC\u{e9}\u{1f600}\u{1f600}"
    );
    assert_eq!(name_of(r#"name: "\xc3\xa9""#), "é");
    assert_eq!(name_of(r#"name: "\x4g\18" 'it"s'"#), "\x04g\x018it\"s");
    for wrong in [
        r#""\q""#,
        r#""\8""#,
        r#""\x""#,
        r#""\u12""#,
        r#""\ud800""#,
        r#""\U00110000""#,
        r#""\400""#,
        r#""\xff""#,
        "\"a",
        "\"a\\",
        "\"a\nb\"",
        "\"a'",
        "\"\0\"",
        "a",
        "1",
        "['a']",
        "",
    ] {
        refusal(&format!("name: {wrong}"));
    }
}

#[test]
fn numbers_are_those_of_the_format() {
    let size = |text: &str| parse(&format!("max_batch_size: {text}")).map(|c| c.max_batch_size);
    for (text, value) in [
        ("0", 0),
        ("017", 15),
        ("0x1F", 31),
        ("-0X1f", -31),
        ("- 5", -5),
        ("-\n# c\n5", -5),
        ("2147483647", i32::MAX),
        ("-2147483648", i32::MIN),
        ("00", 0),
    ] {
        assert_eq!(size(text), Ok(value), "{text}");
    }
    for wrong in [
        "+5",
        "1_000",
        "0b11",
        "0o17",
        "018",
        "0x",
        "1f",
        "1.0",
        "--5",
        "-",
        "2147483648",
        "-2147483649",
        "99999999999999999999",
        "\"1\"",
        "1-2",
        "4name",
        "4.",
        "",
    ] {
        assert!(size(wrong).is_err(), "{wrong}");
    }
    refusal("dynamic_batching { max_queue_delay_microseconds: -0 }");
}

#[test]
fn floats_may_be_infinite_suffixed_or_signed_but_not_octal() {
    let buckets = |text: &str| {
        parse(&format!(
            "model_metrics {{ metric_control {{ histogram_options {{ buckets: {text} }} }} }}"
        ))
        .map(|config| {
            let control = &config.model_metrics.unwrap().metric_control[0];
            match control.metric_options.as_ref().unwrap() {
                pb::model_metrics::metric_control::MetricOptions::HistogramOptions(options) => {
                    options.buckets.clone()
                }
            }
        })
    };
    assert_eq!(
        buckets("[1, 1.5, 2f, 2.5F, 3., .5, 1e3, 1E-3, inf, -Infinity, - 1.5, 1e999, 0.5, 0]")
            .unwrap(),
        [
            1.0,
            1.5,
            2.0,
            2.5,
            3.0,
            0.5,
            1e3,
            1e-3,
            f64::INFINITY,
            f64::NEG_INFINITY,
            -1.5,
            f64::INFINITY,
            0.5,
            0.0
        ]
    );
    assert!(buckets("NaN").unwrap()[0].is_nan());
    for wrong in [
        "010", "01.5", "0x10", "1_0", "1ff", "inff", "1e", "1e+", "1.5.5", "1.5abc", "\"1\"",
    ] {
        assert!(buckets(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn booleans_have_these_spellings_and_no_others() {
    let read = |text: &str| {
        parse(&format!("response_cache {{ enable: {text} }}"))
            .map(|c| c.response_cache.unwrap().enable)
    };
    for yes in ["true", "True", "t", "1", "0x1", "01"] {
        assert_eq!(read(yes), Ok(true), "{yes}");
    }
    for no in ["false", "False", "f", "0"] {
        assert_eq!(read(no), Ok(false), "{no}");
    }
    for wrong in ["TRUE", "F", "T", "yes", "2", "-1", "\"true\"", "1.0"] {
        assert!(read(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn separators_stand_after_a_field_and_only_there() {
    for right in [
        "name: 'a', max_batch_size: 1;",
        "input { dims: 1; dims: 2, } ; output [ ],",
        "input: []",
        "",
    ] {
        assert!(parse(right).is_ok(), "{right}");
    }
    for wrong in [
        ", name: 'a'",
        "name: 'a',, ",
        "name: 'a'; ;",
        "name: 'a',;",
        "input { dims: [1, 2,] }",
        "input { dims: [1; 2] }",
        "input { dims: [1 2] }",
        "input { dims: [[1]] }",
        "input [ {} {} ]",
        "input { dims [1] }",
        "version_policy [ { all {} } ]",
        "name 'a'",
    ] {
        refusal(wrong);
    }
}

#[test]
fn what_is_given_twice_is_refused_unless_the_first_was_the_default() {
    assert_eq!(name_of("name: '' name: 'b'"), "b");
    for wrong in [
        "name: 'a' name: 'a'",
        "version_policy {} version_policy {}",
        "version_policy { all {} latest {} }",
        "version_policy { all {} all {} }",
        "dynamic_batching {} sequence_batching {}",
        "model_warmup { inputs { key: 'x' value { zero_data: false random_data: true } } }",
        "parameters { key: 'a' key: 'b' }",
    ] {
        refusal(wrong);
    }
    let config =
        parse("parameters { key: 'a' value { string_value: '1' } } parameters { key: 'a' }")
            .unwrap();
    assert_eq!(
        config.parameters["a"].string_value, "",
        "the last entry of a map counts"
    );
}

#[test]
fn refusals_name_the_place_and_what_was_expected() {
    for (text, wanted) in [
        (
            "name: \"m\"\n  max_batchsize: 8",
            "2:3: unknown field 'max_batchsize' in message 'inference.ModelConfig' (did you mean \
             'max_batch_size'?)",
        ),
        (
            "input [\n  { name: \"é\", dtype: TYPE_FP32 }\n]",
            "2:16: unknown field 'dtype' in message 'inference.ModelInput'",
        ),
        (
            "input { data_type: TYPE_FP23 }",
            "1:20: 'TYPE_FP23' is not a value of 'inference.DataType' for 'data_type' (did you mean \
             'TYPE_FP32'?)",
        ),
        (
            "max_batch_size \"8\"",
            "1:16: expected ':' after 'max_batch_size', found a quoted string",
        ),
        (
            "max_batch_size: 3000000000",
            "1:17: 3000000000 is out of range for 'max_batch_size': -2147483648 to 2147483647",
        ),
        (
            "input {\n name: 'x'",
            "2:11: expected a field name or '}', found the end of the text",
        ),
        (
            "input < name: 'x' }",
            "1:19: expected a field name or '>', found '}'",
        ),
        (
            "[foo.bar]: 1",
            "1:1: message 'inference.ModelConfig' has no extensions, and '[' can only start one here",
        ),
        (
            "name: 'a'\nname: 'b'",
            "2:1: field 'name' is given more than once",
        ),
        (
            "version_policy { all {} latest {} }",
            "1:25: 'latest' cannot be given with 'all': they are choices for 'policy_choice'",
        ),
        (
            "name: \"abc",
            "1:7: the string has no closing quote on its line",
        ),
        (
            "\u{feff}name: 'a'",
            "1:1: the file starts with a byte order mark; save it as UTF-8 without one",
        ),
        (
            "name: 'a' /* c */",
            "1:11: expected a field name, found '/'",
        ),
    ] {
        assert_eq!(refusal(text), wanted, "{text}");
    }
}

#[test]
fn nesting_goes_as_deep_as_the_schema_and_no_deeper() {
    let text = "input { ".repeat(100_000);
    assert!(refusal(&text).starts_with("1:9: unknown field 'input'"));
    refusal(&"[".repeat(100_000));
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC*") {
        let _ = parse(&text);
    }

    #[test]
    fn no_mixture_of_tokens_makes_the_reader_panic(
        tokens in prop::collection::vec(
            prop::sample::select(vec![
                "name", "input", "dims", "parameters", "key", "value", ":", "{", "}", "[", "]", "<",
                ">", ",", ";", "-", "\"a\"", "'", "\"", "\\", "1", "0x", "1.5", "é", "\n", "#", ".",
            ]),
            0..40,
        )
    ) {
        let _ = parse(&tokens.concat());
        let _ = parse(&tokens.join(" "));
    }
}

#[test]
fn a_refusal_repeats_little_of_a_long_text() {
    let long = "x".repeat(1 << 20);
    for text in [
        format!("{long}: 8"),
        format!("max_batch_size: {long}"),
        format!("input {{ data_type: {long} }}"),
        format!("max_batch_size: {}", "9".repeat(1 << 20)),
    ] {
        assert!(parse(&text).unwrap_err().message.len() < 3000);
    }
    let error = super::super::json::from_json(&format!("{{\"{long}\": 8}}")).unwrap_err();
    assert!(error.message.len() < 3000);
}
