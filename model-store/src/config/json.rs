//! The configuration as JSON: Triton's HTTP answer and the `config` override of a load.

use dormouse_proto::inference as pb;
use prost_reflect::{DynamicMessage, SerializeOptions};
use serde_json::Value;

use super::error::ConfigSyntaxError;
use super::{schema, suggest};

/// Writes a configuration in the form of Triton's HTTP answer: field names as in the schema,
/// fields without presence always there, 64-bit integers as numbers, enumerated values by name.
pub fn to_json(config: &pb::ModelConfig) -> Value {
    let options = SerializeOptions::new()
        .stringify_64_bit_integers(false)
        .use_proto_field_name(true)
        .skip_default_fields(false);
    schema::to_dynamic(config)
        .serialize_with_options(serde_json::value::Serializer, &options)
        .expect("maps have string keys and floats are finite or spelled out")
}

/// Reads a configuration written as JSON, with field names in snake_case or camelCase and 64-bit
/// integers as numbers or strings. Unknown fields are refused.
pub fn from_json(text: &str) -> Result<pb::ModelConfig, ConfigSyntaxError> {
    let mut reader = serde_json::Deserializer::from_str(text);
    DynamicMessage::deserialize(schema::model_config(), &mut reader)
        .and_then(|message| reader.end().map(|()| message))
        .map(|message| schema::from_dynamic(&message))
        .map_err(|error| locate(&error))
}

fn locate(error: &serde_json::Error) -> ConfigSyntaxError {
    let position = |n: usize| u32::try_from(n.max(1)).unwrap_or(u32::MAX);
    let place = (position(error.line()), position(error.column()));
    let shown = error.to_string();
    // The position is a field of its own.
    let suffix = format!(" at line {} column {}", error.line(), error.column());
    let message = shown.strip_suffix(&suffix).unwrap_or(&shown);
    let unknown = message
        .strip_prefix("unrecognized field name '")
        .and_then(|rest| rest.strip_suffix('\''));
    let message = match unknown {
        None => message.to_owned(),
        Some(name) => {
            let names = schema::all_field_names();
            let hint = suggest::hint(name, names.iter().map(String::as_str));
            format!("unknown field '{name}'{hint}")
        }
    };
    ConfigSyntaxError::new(place, message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::text;
    use super::*;

    #[test]
    fn defaults_are_written_and_unset_messages_are_not() {
        let config = text::parse(
            r#"name: "m" input { name: "x" data_type: TYPE_FP32 dims: [ -1, 3 ] }
               version_policy { specific { versions: [ 9007199254740993 ] } }
               dynamic_batching { max_queue_delay_microseconds: 100
                 priority_queue_policy { key: 2 value { timeout_action: DELAY } } }
               parameters { key: "k" value { string_value: "v" } }"#,
        )
        .unwrap();
        let value = to_json(&config);
        assert_eq!(value["max_batch_size"], 0);
        assert_eq!(value["platform"], "");
        assert_eq!(value["output"], json!([]));
        assert_eq!(value["cc_model_filenames"], json!({}));
        assert_eq!(value["parameters"], json!({"k": {"string_value": "v"}}));
        assert_eq!(
            value["input"],
            json!([{
                "name": "x", "data_type": "TYPE_FP32", "format": "FORMAT_NONE", "dims": [-1, 3],
                "is_shape_tensor": false, "allow_ragged_batch": false, "optional": false,
                "is_non_linear_format_io": false
            }])
        );
        assert_eq!(
            value["version_policy"],
            json!({"specific": {"versions": [9007199254740993i64]}})
        );
        let batching = &value["dynamic_batching"];
        assert_eq!(batching["max_queue_delay_microseconds"], 100);
        assert_eq!(
            batching["priority_queue_policy"]["2"]["timeout_action"],
            "DELAY"
        );
        for absent in ["optimization", "sequence_batching", "ensemble_scheduling"] {
            assert!(value.get(absent).is_none(), "{absent}");
        }
        assert_eq!(from_json(&value.to_string()).unwrap(), config);
    }

    #[test]
    fn both_spellings_of_names_and_of_long_integers_are_read() {
        let snake = r#"{"max_batch_size": 8, "input": [{"name": "x", "dims": ["-1", 3],
                        "data_type": "TYPE_FP32"}]}"#;
        let camel = r#"{"maxBatchSize": 8, "input": [{"name": "x", "dims": [-1, "3"],
                        "dataType": 11}]}"#;
        let config = from_json(snake).unwrap();
        assert_eq!(config, from_json(camel).unwrap());
        assert_eq!(config.input[0].dims, [-1, 3]);
    }

    #[test]
    fn what_is_wrong_and_where_is_said() {
        let error = from_json("{\n  \"max_batchsize\": 8\n}").unwrap_err();
        assert_eq!(error.line, 2);
        assert_eq!(
            error.message,
            "unknown field 'max_batchsize' (did you mean 'max_batch_size'?)"
        );
        for (text, wanted) in [
            ("{\"max_batch_size\": \"many\"}", "invalid digit"),
            ("{\"max_batch_size\": 3000000000}", "out of range"),
            (
                "{\"input\": [{\"data_type\": \"FP32\"}]}",
                "unrecognized enum value 'FP32'",
            ),
            (
                "{\"dynamic_batching\": {}, \"sequence_batching\": {}}",
                "scheduling_choice",
            ),
            ("{} {}", "trailing characters"),
            ("[]", "invalid type: sequence"),
            ("", "EOF"),
        ] {
            let error = from_json(text).unwrap_err();
            assert!(error.message.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn deep_nesting_is_refused_not_followed() {
        let deep = format!("{{\"x\": {}", "[".repeat(100_000));
        assert!(from_json(&deep).is_err());
    }
}
