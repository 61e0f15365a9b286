use serde_json::{Map, Value, json};

use super::{ConfigError, ModelConfig, RopeScaling};

/// A configuration in the spelling of early 2024.
fn llama() -> Map<String, Value> {
    let Value::Object(document) = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }) else {
        panic!("an object")
    };
    document
}

fn parse(changes: Value) -> Result<ModelConfig, ConfigError> {
    let mut document = llama();
    let Value::Object(changes) = changes else { panic!("an object") };
    for (key, value) in changes {
        if value == json!("(remove)") {
            document.remove(&key);
        } else {
            document.insert(key, value);
        }
    }
    ModelConfig::from_json(&serde_json::to_vec(&document).unwrap())
}

fn refusal(changes: Value) -> String {
    parse(changes).unwrap_err().to_string()
}

#[test]
fn head_dim_is_given_null_or_derived() {
    for absent in [json!({}), json!({"head_dim": null})] {
        assert_eq!(parse(absent).unwrap().head_dim, 16);
    }
    let config = parse(json!({"head_dim": 32})).unwrap();
    assert_eq!((config.head_dim, config.query_size(), config.key_value_size()), (32, 128, 64));
    assert!(refusal(json!({"num_attention_heads": 6})).contains("head_dim is not given"));
}

#[test]
fn ids_are_numbers_lists_or_nothing() {
    let ids = |value| parse(json!({"eos_token_id": value})).map(|config| config.eos_token_ids);
    assert_eq!(ids(json!(7)).unwrap(), [7]);
    assert_eq!(ids(json!([7, 9])).unwrap(), [7, 9]);
    assert!(ids(Value::Null).unwrap().is_empty());
    assert!(ids(json!(-1)).is_err());
    assert!(ids(json!("</s>")).is_err());
}

#[test]
fn rope_theta_is_read_in_both_places() {
    let nested = |theta| json!({"rope_theta": theta, "rope_parameters": {"rope_theta": 1e4}});
    assert_eq!(parse(json!({})).unwrap().rope_theta, 5e5);
    assert_eq!(parse(nested(json!("(remove)"))).unwrap().rope_theta, 1e4);
    assert_eq!(parse(nested(json!(10000))).unwrap().rope_theta, 1e4);
    let message = refusal(nested(json!(5e5)));
    assert!(message.contains("500000") && message.contains("10000"), "{message}");
    // The new spelling without a base is broken, the old one has a documented value.
    let broken = json!({"rope_theta": "(remove)", "rope_parameters": {"rope_type": "default"}});
    assert!(refusal(broken).contains("rope_parameters.rope_theta is missing"));
    assert_eq!(parse(json!({"rope_theta": "(remove)"})).unwrap().rope_theta, 1e4);
}

#[test]
fn rope_scaling_is_read_in_both_spellings() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 5e5,
    });
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    for key in ["rope_scaling", "rope_parameters"] {
        let config = parse(json!({key: llama3})).unwrap();
        assert_eq!(config.rope_scaling, Some(expected), "{key}");
        assert_eq!(config.raw[key], llama3, "the document is kept");
    }
    let linear = json!({"rope_scaling": {"type": "linear", "factor": 2.0}});
    assert_eq!(parse(linear).unwrap().rope_scaling, Some(RopeScaling::Linear { factor: 2.0 }));
    let plain = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}});
    assert_eq!(parse(plain).unwrap().rope_scaling, None);
    for kind in ["yarn", "dynamic", "longrope", "su"] {
        let message = refusal(json!({"rope_scaling": {"rope_type": kind, "factor": 2.0}}));
        assert!(message.contains(kind) && message.contains("hint: "), "{message}");
    }
    assert!(refusal(json!({"rope_scaling": {"type": "linear"}})).contains("rope_scaling.factor"));
}

#[test]
fn llama3_frequencies_are_those_of_transformers() {
    // python: LlamaRotaryEmbedding(LlamaConfig(head_dim=16, rope_parameters=dict(
    //   rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
    //   high_freq_factor=4.0, original_max_position_embeddings=64))).inv_freq
    let text = include_bytes!("../../../tests/golden/tiny_llama_tied/config_llama3_rope.json");
    let config = ModelConfig::from_json(text).unwrap();
    let expected = [
        1.00000000e+00,
        2.44384587e-01,
        1.30422562e-02,
        3.95284733e-03,
        1.24999997e-03,
        3.95284733e-04,
        1.25000006e-04,
        3.95284733e-05,
    ];
    for (got, expected) in config.rope_frequencies().iter().zip(expected) {
        assert!((got / expected - 1.0).abs() < 1e-6, "{got} {expected}");
    }
    assert_eq!(config.rope_frequencies().len(), expected.len());
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    let cases = [
        (json!({"hidden_act": "gelu"}), "gelu"),
        (json!({"quantization_config": {"quant_method": "fp8"}}), "fp8"),
        (json!({"partial_rotary_factor": 0.25}), "partial_rotary_factor"),
        (json!({"use_parallel_residual": true}), "use_parallel_residual"),
        (json!({"qk_layernorm": true}), "qk_layernorm"),
    ];
    for (change, name) in cases {
        let message = refusal(change);
        assert!(message.contains(name) && message.contains("hint: "), "{message}");
    }
}

/// Old and sparse spellings, as early files of each family have them.
#[test]
fn families_fill_in_what_their_files_leave_out() {
    let family = |name: &str, changes: Value| {
        let mut all = json!({"architectures": [name], "model_type": "(remove)"});
        let object = all.as_object_mut().unwrap();
        object.extend(changes.as_object().unwrap().clone());
        parse(all).unwrap()
    };
    let llama = family("LlamaForCausalLM", json!({"attention_bias": true, "sliding_window": 9}));
    assert!(llama.anatomy.qkv_bias && llama.anatomy.o_bias && !llama.anatomy.mlp_bias);
    assert_eq!(llama.anatomy.windows, [None, None], "Llama knows no window");

    let mistral = family("MistralForCausalLM", json!({"sliding_window": 4096}));
    assert_eq!(mistral.anatomy.windows, [Some(4096), Some(4096)]);
    let mistral = family("MistralForCausalLM", json!({"sliding_window": null, "qkv_bias": true}));
    assert_eq!(mistral.anatomy.windows, [None, None]);
    assert!(mistral.anatomy.qkv_bias && !mistral.anatomy.o_bias);

    let window = json!({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1});
    assert_eq!(family("Qwen2ForCausalLM", window).anatomy.windows, [None, Some(8)]);
    let window = json!({"use_sliding_window": false, "sliding_window": 8, "max_window_layers": 1});
    let qwen = family("Qwen2ForCausalLM", window);
    assert_eq!(qwen.anatomy.windows, [None, None]);
    assert!(qwen.anatomy.qkv_bias && !qwen.anatomy.o_bias);
    let qwen = family("Qwen3ForCausalLM", json!({}));
    assert!(qwen.anatomy.qk_norm && !qwen.anatomy.qkv_bias);
    assert_eq!(qwen.head_dim, 128);

    let gemma = family("Gemma2ForCausalLM", json!({"hidden_act": "gelu_pytorch_tanh"}));
    assert!(gemma.tie_word_embeddings && gemma.anatomy.post_norms);
    assert_eq!((gemma.head_dim, gemma.anatomy.windows.as_slice()), (256, &[Some(4096), None][..]));
    assert_eq!(gemma.anatomy.attention_softcap, Some(50.0));
    assert_eq!(gemma.anatomy.final_softcap, Some(30.0));
    assert_eq!((gemma.anatomy.embedding_scale, gemma.anatomy.attention_scale), (8.0, 0.0625));
    let uncapped = json!({"final_logit_softcapping": null, "attn_logit_softcapping": null});
    let gemma = family("Gemma2ForCausalLM", uncapped);
    assert_eq!((gemma.anatomy.attention_softcap, gemma.anatomy.final_softcap), (None, None));

    let stable = json!({"layer_norm_eps": 1e-6, "rms_norm_eps": "(remove)"});
    let stable = family("StableLmForCausalLM", stable);
    assert_eq!((stable.anatomy.rotary_dim, stable.norm_eps), (4, 1e-6));
    assert!(!stable.anatomy.qkv_bias);
}

#[test]
fn layer_types_that_do_not_fit_are_refused() {
    let change = |types: Value| json!({"architectures": ["Gemma2ForCausalLM"], "layer_types": types, "hidden_act": "gelu"});
    assert!(refusal(change(json!(["full_attention"]))).contains("layer_types has 1 entries"));
    assert!(refusal(change(json!(["full_attention", "chunked"]))).contains("chunked"));
}

#[test]
fn other_architectures_are_refused_by_name_and_kind() {
    let cases = [
        ("MixtralForCausalLM", "mixture of experts"),
        ("Qwen2MoeForCausalLM", "mixture of experts"),
        ("Llama4ForConditionalGeneration", "mixture of experts"),
        ("DeepseekV3ForCausalLM", "latent attention"),
        ("MambaForCausalLM", "state-space"),
        ("JambaForCausalLM", "state-space"),
        ("BertModel", "encoder"),
        ("T5ForConditionalGeneration", "encoder"),
        ("LlavaForConditionalGeneration", "multimodal"),
        ("Qwen2VLForConditionalGeneration", "multimodal"),
        ("Phi3ForCausalLM", "not yet supported"),
        ("Gemma3ForCausalLM", "not yet supported"),
        ("LlamaForSequenceClassification", "without a language-model head"),
        ("LlamaModel", "without a language-model head"),
    ];
    for (name, kind) in cases {
        let message = refusal(json!({"architectures": [name]}));
        assert!(message.contains(name) && message.contains(kind), "{message}");
        assert!(message.contains("hint: "), "{message}");
    }
    let message = refusal(json!({"num_local_experts": 8}));
    assert!(message.contains("mixture of experts"), "{message}");
    assert!(refusal(json!({"vision_config": {}})).contains("multimodal"));
    let unnamed = json!({"architectures": "(remove)", "model_type": "mamba2"});
    assert!(refusal(unnamed).contains("state-space"));
    assert!(parse(json!({"architectures": "(remove)"})).is_ok());
}

#[test]
fn broken_documents_name_the_key() {
    assert!(refusal(json!({"hidden_size": "(remove)"})).contains("key hidden_size is missing"));
    assert!(refusal(json!({"hidden_size": "64"})).contains("hidden_size: expected a whole number"));
    assert!(refusal(json!({"hidden_size": 0})).contains("hidden_size is 0"));
    assert!(refusal(json!({"vocab_size": 1e300})).contains("vocab_size"));
    assert!(refusal(json!({"rms_norm_eps": -1.0})).contains("rms_norm_eps"));
    assert!(refusal(json!({"num_key_value_heads": 3})).contains("not a multiple"));
    assert!(refusal(json!({"head_dim": 7})).contains("odd"));
    assert!(ModelConfig::from_json(b"{").unwrap_err().to_string().contains("not valid JSON"));
    assert!(ModelConfig::from_json(b"[]").is_err());
}

#[test]
fn ties_and_keys_heads_have_llamas_defaults() {
    let config = parse(json!({"num_key_value_heads": null})).unwrap();
    assert_eq!(config.num_key_value_heads, 4);
    assert!(!config.tie_word_embeddings);
    assert!(parse(json!({"tie_word_embeddings": true})).unwrap().tie_word_embeddings);
}
