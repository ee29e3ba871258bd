//! Strings and the resulting settings, as tables. Random strings are in `properties.rs`.

use super::keys::{KEYS, Key};
use super::*;

/// What differs from the defaults, or the error.
fn written(result: Result<Settings, SettingsError>) -> String {
    result.map_or_else(|error| error.to_string(), |settings| settings.to_conf_string())
}

fn check(string: &str, expected: &str) {
    assert_eq!(written(Settings::parse(string)), expected, "settings {string:?}");
}

/// For a string that is written as it was read.
fn check_same(string: &str) {
    check(string, string);
}

/// Applies strings one after the other.
fn check_updates(strings: &[&str], expected: &str) {
    let start = Settings::parse(strings[0]);
    let end =
        strings[1..].iter().fold(start, |settings, string| settings.and_then(|settings| settings.updated(string)));
    assert_eq!(written(end), expected, "settings {strings:?}");
}

#[test]
fn every_key_is_read_and_written() {
    check_same("");
    check_same("backend:cudaMallocAsync");
    check_same("large_segment_size_mb:12");
    check_same("max_split_size_mb:20");
    check_same("max_non_split_rounding_mb:21");
    check_same("garbage_collection_threshold:0.8");
    check_same("roundup_power2_divisions:4");
    check_same("expandable_segments:True");
    check_same("expandable_segments_reserve:0.5");
    check_same("expandable_segments_reserve:40G");
    check_same("expandable_segments_reserve_by_class:[comm:0.25,copy:1.5G]");
    check_same("release_lock_on_cudamalloc:True");
    check_same("graph_capture_record_stream_reuse:True");
    check_same("per_process_memory_fraction:0.5");
    check_same("per_process_memory_fraction:0.0");
    check_same("throw_on_cudamalloc_oom:True");
    check_same("pinned_use_cuda_host_register:True");
    check_same("pinned_num_register_threads:128");
    check_same("pinned_use_background_threads:True");
    check_same("pinned_reserve_segment_size_mb:1");
    check_same("pinned_max_round_threshold_mb:0");
    check_same("pinned_max_cached_size_mb:64");
    check_same("pinned_free_catch_all:True");
    check_same("pinned_cap_mb:2");
    check_same("pinned_device_cap_mb:2");
    check_same("free_block_order:address");
    check_same("memory_cap_mb:2");
    check_same("idle_decay_ms:1");
    check_same("share:True,share_guaranteed:20GiB,share_limit:1025MiB,share_priority:7,share_reclaim_ms:20");
    check("share_limit:1024MiB,share_guaranteed:3B", "share_guaranteed:3B,share_limit:1GiB");
}

#[test]
fn equivalent_strings_are_accepted() {
    check(" max_split_size_mb : 2 0 0 ,\n expandable _segments:False", "max_split_size_mb:200");
    check("expandable_segments:True,", "expandable_segments:True");
    check("release_lock_on_hipmalloc:True", "release_lock_on_cudamalloc:True");
    check("pinned_use_hip_host_register:True", "pinned_use_cuda_host_register:True");
    check("garbage_collection_threshold:8e-1", "garbage_collection_threshold:0.8");
    check("expandable_segments_reserve:40.0g", "expandable_segments_reserve:40G");
    check("expandable_segments_reserve:1e30G", "expandable_segments_reserve:17179869184G");
    check("expandable_segments_reserve_by_class:[]", "");
    check("per_process_memory_fraction:-0.0", "per_process_memory_fraction:0.0");
    check("max_split_size_mb:18446744073709551615", "max_split_size_mb:17592186044415");
    // The size of large segments is applied first, at any position.
    check("max_split_size_mb:15,large_segment_size_mb:12", "large_segment_size_mb:12,max_split_size_mb:15");
}

#[test]
fn divisions_are_a_table_by_powers_of_two() {
    let check_table = |string: &str, expected: [u64; 16], written: &str| {
        let settings = Settings::parse(&format!("roundup_power2_divisions:{string}")).unwrap();
        assert_eq!(settings.roundup_power2_divisions, expected, "divisions {string:?}");
        assert_eq!(settings.to_conf_string(), format!("roundup_power2_divisions:{written}"));
    };
    check_table("8", [8; 16], "8");
    check_table("[1:8,>:8]", [8; 16], "8");
    check_table(
        "[256:1,512:2,1024:4,>:8]",
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8],
        "[256:1,512:2,1024:4,>:8]",
    );
    check_table(
        "[64:8,128:2,256:4,512:2,1024:4,>:1]",
        [8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1],
        "[64:8,128:2,256:4,512:2,1024:4,>:1]",
    );
    check_table("[64:8,256:4]", [8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 0, 0, 0, 0, 0, 0], "[64:8,256:4]");
    check_table("[64:0,256:4,>:4]", [0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4], "[128:0,>:4]");
    check_table("[32768:2]", [2; 16], "2");
    check_table("[2:4,131072:2]", [4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2], "[2:4,16384:0,>:2]");

    let settings = Settings::parse("roundup_power2_divisions:[1:2,64:8,256:4,>:16]").unwrap();
    let cases = [
        (0, 2),
        (1, 2),
        (2 * MIB - 1, 2),
        (2 * MIB, 0),
        (64 * MIB - 1, 0),
        (84 * MIB, 8),
        (128 * MIB, 0),
        (400 * MIB, 4),
        (512 * MIB, 16),
        (64 * GIB, 16),
        (u64::MAX, 16),
    ];
    for (bytes, steps) in cases {
        assert_eq!(settings.divisions_for(bytes), steps, "divisions for {bytes} bytes");
    }
}

#[test]
fn delimiters_are_strict() {
    check(
        "max_split_size_mb",
        "settings: at byte 17: `max_split_size_mb`: expected `:` and a value, found the end of the string",
    );
    check(
        "max_split_size_mb:",
        "settings: at byte 18: `max_split_size_mb`: expected a value, found the end of the string",
    );
    check(
        "max_split_size_mb,200",
        "settings: 2 problems
  at byte 17: `max_split_size_mb`: expected `:` and a value, found `,`
  at byte 21: `200`: expected `:` and a value, found the end of the string",
    );
    check(
        "expandable_segments=True",
        "settings: at byte 0: `expandable_segments=True`: write `expandable_segments:True`, with a colon",
    );
    check("a::b", "settings: at byte 2: `a`: expected a value, found `:`");
    check(",expandable_segments:True", "settings: at byte 0: expected a key, found `,`; remove it");
    check("expandable_segments:True,,", "settings: at byte 25: expected a key, found `,`; remove it");
    check(
        "expandable_segments:True:pinned_free_catch_all:True",
        "settings: at byte 24: `expandable_segments`: expected `,` or the end, found `:`",
    );
    check(
        "roundup_power2_divisions:[64:8",
        "settings: at byte 30: `roundup_power2_divisions`: expected `,` or `]`, found the end of the string",
    );
    check(
        "roundup_power2_divisions:[64,8]",
        "settings: at byte 28: `roundup_power2_divisions`: expected `:` and a value in the list, found `,`",
    );
    check(
        "roundup_power2_divisions:[64:8,]",
        "settings: at byte 31: `roundup_power2_divisions`: expected an entry `NAME:VALUE` of the list, found `]`",
    );
    check(
        "expandable_segments:True]",
        "settings: at byte 24: `expandable_segments`: expected `,` or the end, found `]`",
    );
    // After a problem in a list, reading continues after the list.
    check(
        "roundup_power2_divisions:[64:8:2,1:2],bakend:native",
        "settings: 2 problems
  at byte 30: `roundup_power2_divisions`: expected `,` or `]`, found `:`
  at byte 38: `bakend`: unknown key; did you mean `backend`?",
    );
}

#[test]
fn unknown_keys_are_problems() {
    check(
        "max_splt_size_mb:200",
        "settings: at byte 0: `max_splt_size_mb`: unknown key; did you mean `max_split_size_mb`?",
    );
    check(
        "max_split_size:200",
        "settings: at byte 0: `max_split_size`: unknown key; did you mean `max_split_size_mb`?",
    );
    check(
        "Expandable_Segments:True",
        "settings: at byte 0: `Expandable_Segments`: unknown key; did you mean `expandable_segments`?",
    );
    check(
        "'expandable_segments:True'",
        "settings: at byte 0: `'expandable_segments`: unknown key; remove the quotation marks from the string",
    );
    check("a=b:c", "settings: at byte 0: `a=b`: unknown key; write `key:value`, with commas between entries");
    check(
        "expandable_segments_handle_type:posix_fd",
        "settings: at byte 0: `expandable_segments_handle_type`: unknown key: PyTorch's messages mention it, but \
         PyTorch does not read it; remove it",
    );
    check(
        "paged_slack:2",
        "settings: at byte 0: `paged_slack`: no longer a key: it reserved more and saved no time; remove it",
    );
    check("quux:1", "settings: at byte 0: `quux`: unknown key: neither PyTorch nor Warpool has it; remove it");
}

#[test]
fn values_are_checked() {
    let refused = |entry: &str, expected: &str| {
        let (key, value) = entry.split_once(':').unwrap();
        let error = Settings::parse(entry).unwrap_err();
        assert_eq!(error.problems.len(), 1, "settings {entry:?}: {error}");
        let Problem { key: reported, at, text } = &error.problems[0];
        assert_eq!((reported.as_str(), text.as_str()), (key, expected), "settings {entry:?}");
        let position = at.unwrap();
        assert!((key.len() + 1..key.len() + 1 + value.len()).contains(&position), "settings {entry:?} at {position}");
    };
    refused(
        "backend:cudamallocasync",
        "invalid value `cudamallocasync`; expected native, expandable, paged or cudaMallocAsync; did you mean \
         `cudaMallocAsync`?",
    );
    refused(
        "backend:hipMallocAsync",
        "invalid value `hipMallocAsync`; expected native, expandable, paged or cudaMallocAsync; did you mean \
         `cudaMallocAsync`?",
    );
    refused("backend:[a:b]", "a list is not allowed; expected native, expandable, paged or cudaMallocAsync");
    refused("large_segment_size_mb:10", "`10` is too small; give at least 11");
    refused(
        "max_split_size_mb:19",
        "`19` is too small; give at least 20, the size of large segments (`large_segment_size_mb`)",
    );
    refused("max_split_size_mb:-1", "invalid value `-1`; expected an integer, at least large_segment_size_mb");
    refused(
        "max_split_size_mb:512MB",
        "invalid value `512MB`; expected an integer, at least large_segment_size_mb; the unit is MiB, write the \
         number alone",
    );
    refused(
        "max_split_size_mb:18446744073709551616",
        "`18446744073709551616` does not fit in 64 bits; give a smaller number",
    );
    refused(
        "max_non_split_rounding_mb:19",
        "`19` is too small; give at least 20, the size of large segments (`large_segment_size_mb`)",
    );
    for value in ["0", "0.0", "1.0", "1", "-0.5", "nan", "inf", "0.8x"] {
        refused(
            &format!("garbage_collection_threshold:{value}"),
            &format!("invalid value `{value}`; expected a number above 0.0 and below 1.0"),
        );
    }
    for value in ["1.1", "-0.1", "NaN", "-inf", "half"] {
        refused(
            &format!("per_process_memory_fraction:{value}"),
            &format!("invalid value `{value}`; expected a number from 0.0 to 1.0"),
        );
    }
    for (value, meant) in [("true", "True"), ("1", "True"), ("Tru", "True"), ("FALSE", "False"), ("off", "False")] {
        refused(
            &format!("expandable_segments:{value}"),
            &format!("invalid value `{value}`; expected True or False; did you mean `{meant}`?"),
        );
    }
    refused("expandable_segments:maybe", "invalid value `maybe`; expected True or False");
    for value in ["0", "-1", "nan", "inf", "half", "G", "0G", "-4G", "1e-12G", "40GB", "40M"] {
        let text =
            format!("invalid value `{value}`; expected a fraction of the device such as 0.5, or GiB such as 40G");
        refused(&format!("expandable_segments_reserve:{value}"), &text);
        refused(&format!("expandable_segments_reserve_by_class:[a:0.5,b:{value}]"), &text);
    }
    refused("expandable_segments_reserve_by_class:0.5", "invalid value `0.5`; expected a list [CLASS:RESERVE,...]");
    for value in ["0", "3", "256"] {
        refused(
            &format!("pinned_num_register_threads:{value}"),
            &format!("invalid value `{value}`; expected a power of two up to 128"),
        );
    }
    refused("pinned_reserve_segment_size_mb:0", "`0` is too small; give at least 1");
    refused(
        "free_block_order:adress",
        "invalid value `adress`; expected registration or address; did you mean `address`?",
    );
    refused("pinned_cap_mb:1", "`1` is too small; give at least 2");
    refused("pinned_device_cap_mb:1", "`1` is too small; give at least 2");
    refused("memory_cap_mb:1", "`1` is too small; give at least 2");
    refused("idle_decay_ms:0", "invalid value `0`; expected an integer above 0");
    for value in ["20", "20GB", "GiB", "-1GiB", "0.5GiB", "20gib", "17592186044416MiB"] {
        let text = format!("invalid value `{value}`; expected a size such as 20GiB or 512MiB");
        refused(&format!("share_guaranteed:{value}"), &text);
        refused(&format!("share_limit:{value}"), &text);
    }
    refused("share_priority:high", "invalid value `high`; expected an integer");
    refused("share_reclaim_ms:0", "invalid value `0`; expected an integer above 0");
    refused("idle_decay_ms:5s", "invalid value `5s`; expected an integer above 0");
}

#[test]
fn divisions_are_checked() {
    let refused = |value: &str, at: usize, expected: &str| {
        let error = Settings::parse(&format!("roundup_power2_divisions:{value}")).unwrap_err();
        let found: Vec<_> = error.problems.iter().map(|problem| (problem.at, problem.text.as_str())).collect();
        assert_eq!(found, [(Some("roundup_power2_divisions:".len() + at), expected)], "divisions {value:?}");
    };
    refused("0", 0, "`0` is not a power of two");
    refused("3", 0, "`3` is not a power of two");
    refused("[]", 0, "the list is empty; remove the key to turn this rounding off");
    refused("[1:3]", 3, "`3` is not a power of two");
    refused("[3:1]", 1, "`3` is not a power of two");
    refused("[0:1]", 1, "`0` is not a power of two");
    refused("[>:4]", 1, "`>` covers all sizes above the last one; give a size first");
    refused("[1:2,>:4,2:2]", 5, "`>` covers all sizes above the last one; put it last");
    refused("[4:2,2:4]", 5, "sizes must ascend, but `2` follows a size that is not smaller");
    refused("[4:2,4:4]", 5, "sizes must ascend, but `4` follows a size that is not smaller");
    refused("[x:2]", 1, "invalid value `x`; expected a power of two, or a list [MIB:DIVISIONS,...,>:DIVISIONS]");
}

#[test]
fn settings_that_exclude_each_other_are_problems() {
    let together = "the driver's pool has no expandable segments; remove either `backend:cudaMallocAsync` or \
                    `expandable_segments:True`";
    check("expandable_segments:True,backend:cudaMallocAsync", &format!("settings: at byte 25: `backend`: {together}"));
    check_updates(
        &["backend:cudaMallocAsync", "expandable_segments:True"],
        &format!("settings: at byte 0: `expandable_segments`: {together}"),
    );
    check(
        "max_split_size_mb:32,large_segment_size_mb:40",
        "settings: at byte 18: `max_split_size_mb`: `32` is too small; give at least 40, the size of large segments \
         (`large_segment_size_mb`)",
    );
    check_same("large_segment_size_mb:13");
    let odd = "expandable segments are mapped in steps of 2 MiB; give an even number";
    check(
        "expandable_segments:True,large_segment_size_mb:13",
        &format!("settings: at byte 25: `large_segment_size_mb`: {odd}"),
    );
    check_updates(
        &["large_segment_size_mb:13", "expandable_segments:True"],
        &format!("settings: at byte 0: `expandable_segments`: {odd}"),
    );
}

#[test]
fn backends_have_names() {
    check_same("backend:paged");
    check_same("backend:cudaMallocAsync");
    check("backend:native", "");
    for string in ["backend:expandable", "backend:expandable,expandable_segments:True"] {
        check(string, "expandable_segments:True");
        assert_eq!(Settings::parse(string).unwrap().backend, Backend::Native);
    }
    check("backend:expandable,backend:native", "");
    let on = "settings: at byte 19: `expandable_segments`: `backend:expandable` turns expandable segments on; remove \
              either, or choose `backend:native`";
    check("backend:expandable,expandable_segments:False", on);
    check("expandable_segments:False,backend:expandable", &on.replace("byte 19", "byte 0"));
    check_updates(&["", "backend:expandable"], "expandable_segments:True");
    check_updates(&["backend:expandable", "expandable_segments:False"], "");
    check_updates(
        &["backend:paged", "backend:expandable"],
        "settings: at byte 0: `backend`: the backend is paged and cannot be changed; remove the key, or restart the \
         program with it",
    );
    check_updates(&["backend:paged", "memory_cap_mb:3"], "backend:paged,memory_cap_mb:3");
    let values = lint("backend:expandable").values;
    let origin = |key: &str| values.iter().find(|value| value.key == key).map(|value| value.origin);
    assert_eq!((origin("backend"), origin("expandable_segments")), (Some(Origin::Given), Some(Origin::Given)));
}

/// A caller's default backend: the string may name another.
#[test]
fn backend_of_a_string_without_one() {
    let of = |string: &str| Settings::parse_for(Backend::Paged, string).unwrap().to_conf_string();
    assert_eq!(of(""), "backend:paged");
    assert_eq!(of("memory_cap_mb:5"), "backend:paged,memory_cap_mb:5");
    assert_eq!(of("backend:native"), "");
    assert_eq!(of("backend:expandable"), "expandable_segments:True");
    assert_eq!(of("backend:cudaMallocAsync"), "backend:cudaMallocAsync");
    assert!(Settings::parse_for(Backend::Paged, "backend:pages").is_err());
}

#[test]
fn updates_reset_some_and_keep_others() {
    let all = "large_segment_size_mb:40,max_split_size_mb:200,max_non_split_rounding_mb:64,\
               garbage_collection_threshold:0.8,\
               roundup_power2_divisions:4,expandable_segments:True,expandable_segments_reserve:0.5,\
               expandable_segments_reserve_by_class:[a:2G],release_lock_on_cudamalloc:True,\
               graph_capture_record_stream_reuse:True,per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True,\
               pinned_use_cuda_host_register:True,pinned_num_register_threads:8,pinned_use_background_threads:True,\
               pinned_reserve_segment_size_mb:64,pinned_max_round_threshold_mb:16,pinned_max_cached_size_mb:32,\
               pinned_free_catch_all:True,pinned_cap_mb:4096,pinned_device_cap_mb:2048,\
               free_block_order:address,memory_cap_mb:4096,idle_decay_ms:10000,\
               share:True,share_guaranteed:20GiB,share_limit:60GiB,share_priority:1,share_reclaim_ms:20";
    check_same(all);
    check_updates(&[all, all], all);
    let resets = |entry: &&str| KEYS.iter().any(|info| info.resets && entry.starts_with(&format!("{}:", info.name)));
    let kept: Vec<&str> = all.split(',').filter(|entry| !resets(entry)).collect();
    check_updates(&[all, ""], &kept.join(","));
    assert_eq!(Settings::parse(all).unwrap().updated("").unwrap().max_non_split_rounding_bytes, 40 * MIB);

    check_updates(&["roundup_power2_divisions:4", "max_split_size_mb:30"], "max_split_size_mb:30");
    check_updates(
        &["large_segment_size_mb:40", "max_split_size_mb:30"],
        "settings: at byte 18: `max_split_size_mb`: `30` is too small; give at least 40, the size of large segments \
         (`large_segment_size_mb`)",
    );
    check_updates(
        &["expandable_segments_reserve_by_class:[a:2G]", "expandable_segments_reserve_by_class:[b:1G]"],
        "expandable_segments_reserve_by_class:[b:1G]",
    );
    check_updates(&["", "backend:native"], "");
    check_updates(
        &["", "backend:cudaMallocAsync"],
        "settings: at byte 0: `backend`: the backend is native and cannot be changed; remove the key, or restart the \
         program with it",
    );
    assert_eq!(Settings::parse("expandable_segments:True").unwrap().updated(" ").unwrap().text, " ");
}

#[test]
fn all_problems_are_reported_at_once() {
    check(
        "large_segment_size_mb:x,garbage_collection_threshold:2,max_splt:1,expandable_segments:yes,\
         pinned_free_catch_all",
        "settings: 5 problems
  at byte 22: `large_segment_size_mb`: invalid value `x`; expected an integer above 10
  at byte 53: `garbage_collection_threshold`: invalid value `2`; expected a number above 0.0 and below 1.0
  at byte 55: `max_splt`: unknown key: neither PyTorch nor Warpool has it; remove it
  at byte 86: `expandable_segments`: invalid value `yes`; expected True or False; did you mean `True`?
  at byte 111: `pinned_free_catch_all`: expected `:` and a value, found the end of the string",
    );
}

#[test]
fn the_docs_list_the_keys() {
    let lines = include_str!("mod.rs").lines().map(|line| line.trim_start_matches("/// ").trim());
    let docs = lines.collect::<Vec<_>>().join(" ");
    for (number, info) in KEYS.iter().enumerate() {
        assert_eq!(info.key as usize, number, "{} is in the order of the enum", info.name);
        assert_eq!(Key::named(info.name), Some(info.key), "{} is named once", info.name);
        let reset = if info.resets { "; reset" } else { "" };
        let line = format!("- `{}` ({}{reset}): {}. ", info.name, info.expects, info.meaning);
        assert!(docs.contains(&line), "the list of keys has no entry\n{line}");
        assert!(
            info.alias.is_none_or(|alias| docs.contains(&format!("`{alias}`"))),
            "the docs do not name {:?}",
            info.alias
        );
    }
    assert_eq!(docs.matches("- `").count(), KEYS.len(), "one entry for each key");
}

/// The page of the book, made from the table of keys.
fn page_of_the_book() -> String {
    let mut page = "\
<!-- Generated from the table of keys by crates/warpool/src/memory/settings/tests.rs. Do not edit. -->

# Settings

A settings string is a list of `key:value`, separated by commas, in the grammar of PyTorch's `PYTORCH_CUDA_ALLOC_CONF`.
White space is ignored. A value is a word or a list `[name:value,name:value]`. An unknown key, a wrong value and a wrong
delimiter are errors, and an invalid string changes nothing.

Under PyTorch settings come from the argument of `warpool.torch.enable`, or else from the environment variable
`WARPOOL_CONF`; either is applied on top of `PYTORCH_CUDA_ALLOC_CONF`. In Rust `Settings::parse` reads them, in C
`warpool_set_settings`. `warpool settings` explains a string:

```sh
warpool settings expandable_segments:True,garbage_collection_threshold:0.8
```

A *reset* key is set to its default by every further string that does not name it; the others keep their values.
*Effect* names the backends that a key has an effect on.

| key | values | default | effect | meaning |
|---|---|---|---|---|
"
    .to_owned();
    let defaults = Settings::default();
    for info in &KEYS {
        let default = info.key.value(&defaults).unwrap_or_else(|| info.unset.to_owned());
        let effect: Vec<String> = info.backends.iter().map(|backend| format!("`{}`", backend.name())).collect();
        let effect = if info.backends.len() == Backend::ALL.len() { "all".to_owned() } else { effect.join(", ") };
        let alias = info.alias.map_or_else(String::new, |alias| format!("; alias `{alias}`"));
        let reset = if info.resets { "; reset" } else { "" };
        page.push_str(&format!(
            "| `{}` | {} | {default} | {effect} | {}{reset}{alias} |\n",
            info.name,
            info.expects.replace('[', "\\[").replace('>', "\\>"),
            info.meaning
        ));
    }
    page
}

/// WARPOOL_WRITE_REFERENCE=1 writes the page.
#[test]
fn the_page_of_the_book_is_up_to_date() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/settings.md");
    let page = page_of_the_book();
    if std::env::var_os("WARPOOL_WRITE_REFERENCE").is_some() {
        std::fs::write(&file, &page).expect("the page can be written");
    }
    assert!(
        std::fs::read_to_string(&file).unwrap_or_default() == page,
        "docs/reference/settings.md is out of date: \
         WARPOOL_WRITE_REFERENCE=1 cargo test -p warpool --lib the_page_of_the_book"
    );
}
