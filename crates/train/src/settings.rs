//! What settings a recipe has: its fields with their documentation, for people. The recipe's type is the only list of them.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor};
use serde::{Serialize, forward_to_deserialize_any};
use serde_json::Value;
use toml::Table;

/// A key of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// The key, as `--set` takes it; `phase.N.` stands before those of a phase.
    pub key: String,
    /// The default as TOML; none where it depends on something else, or where there is none.
    pub default: Option<String>,
    /// What it means.
    pub meaning: String,
    /// The values that it can have, with what each means, where these are names.
    pub choices: Vec<(String, String)>,
}

/// The settings of a recipe in the order of its fields, those of tables in it included.
pub fn settings<T: JsonSchema + Default + Serialize + DeserializeOwned>() -> Vec<Setting> {
    let schema = schema::<T>();
    let defaults = Table::try_from(T::default()).unwrap_or_default();
    let mut found = Vec::new();
    for key in fields::<T>() {
        let Some(property) = schema.as_value().pointer(&format!("/properties/{key}")) else { continue };
        let shown = defaults.get(*key).map(ToString::to_string);
        let default = shown.filter(|value| !["\"\"", "[]", "{}"].contains(&value.as_str()));
        found.push(Setting { key: (*key).to_owned(), default, meaning: meaning(property), choices: choices(property) });
        // A list of tables, or a table, which may be left out.
        for (way, prefix) in [("/items/properties", ".N."), ("/properties", "."), ("/anyOf/0/properties", ".")] {
            for (name, inner) in property.pointer(way).and_then(Value::as_object).into_iter().flatten() {
                let key = format!("{key}{prefix}{name}");
                let default = inner.get("default").filter(|value| !value.is_null()).map(ToString::to_string);
                found.push(Setting { key, default, meaning: meaning(inner), choices: choices(inner) });
            }
        }
    }
    found
}

/// The values that a setting with names for values can have, with what each means.
pub fn choices_of<T: JsonSchema>() -> Vec<(String, String)> {
    choices(schema::<T>().as_value())
}

fn schema<T: JsonSchema>() -> schemars::Schema {
    let schema = SchemaSettings::default().with(|settings| settings.inline_subschemas = true);
    schema.into_generator().into_root_schema_for::<T>()
}

/// The documentation in one line.
fn meaning(property: &Value) -> String {
    let text = property["description"].as_str().unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The names that a value can be.
fn choices(property: &Value) -> Vec<(String, String)> {
    let name = |value: &Value| value.as_str().map(str::to_owned);
    let documented = property["oneOf"].as_array().or(property["anyOf"].as_array()).into_iter().flatten();
    let documented = documented.filter_map(|choice| Some((name(&choice["const"])?, meaning(choice))));
    let plain =
        property["enum"].as_array().into_iter().flatten().filter_map(|choice| Some((name(choice)?, String::new())));
    documented.chain(plain).collect()
}

/// The names of a struct's fields in their order, which serde tells to whoever deserializes it.
fn fields<T: DeserializeOwned>() -> &'static [&'static str] {
    let mut found: &'static [&'static str] = &[];
    // It never gets a value, so it always fails.
    drop(T::deserialize(Names(&mut found)));
    found
}

struct Names<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Names<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(Self::Error::custom("not a struct"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = fields;
        Err(Self::Error::custom("only its fields are wanted"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq
        tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recipe;

    #[test]
    fn every_key_has_a_meaning() {
        let found = settings::<Recipe>();
        let at = |key: &str| found.iter().find(|setting| setting.key == key).unwrap();
        assert!(found.iter().all(|setting| !setting.meaning.is_empty()));
        assert_eq!(at("batch_size").default.as_deref(), Some("32"));
        assert_eq!((at("steps").default.as_ref(), at("data").default.as_ref()), (None, None));
        let names: Vec<&str> = at("objective").choices.iter().map(|(name, _)| name.as_str()).collect();
        let [encoders, writers] = [
            ["mlm-nsp", "mlm-sop", "mlm", "span-boundary", "causal", "replaced-tokens"].as_slice(),
            &["span-corruption", "denoising", "permutation", "bidirectional"],
        ];
        assert_eq!((names, at("objective").default.as_deref()), ([encoders, writers].concat(), Some("\"mlm-nsp\"")));
        assert!(at("phase.N.share").meaning.contains("share"));
        // None is missing: the keys of the default recipe are among them, and the first is the first.
        let saved: Table = Recipe::default().to_toml().unwrap().parse().unwrap();
        assert!(saved.keys().all(|key| found.iter().any(|setting| setting.key == *key)));
        assert_eq!(found[0].key, "model");
    }
}
