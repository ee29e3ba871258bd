//! The parameters of a kernel, read from its CUDA source: the simulated device has no compiler that knows them.
//!
//! Only pointers and the number types of CUDA C++ are understood. With any other type the sizes are unknown, and a
//! launch is not checked.

/// The sizes of the parameters of kernel `name`, in bytes; `None` if the source does not define it, or one of its types
/// is unknown.
pub fn parameter_sizes(source: &str, name: &str) -> Option<Vec<u64>> {
    let source = without_comments(source);
    let list = parameter_list(&source, name)?.trim();
    if list.is_empty() || list == "void" {
        return Some(Vec::new());
    }
    list.split(',').map(size_of_parameter).collect()
}

/// The text between the parentheses after the kernel's name.
fn parameter_list<'a>(source: &'a str, name: &str) -> Option<&'a str> {
    source.match_indices("__global__").find_map(|(at, marker)| {
        let rest = &source[at + marker.len()..];
        let open = rest.find('(').filter(|&open| !is_launch_bounds(&rest[..open]));
        // `__launch_bounds__(256)` may come between `__global__` and the name.
        let open = match open {
            Some(open) => open,
            None => {
                let after = rest.find(')')? + 1;
                after + rest[after..].find('(')?
            }
        };
        let declared = rest[..open].split_whitespace().last()?;
        let close = open + rest[open..].find(')')?;
        (declared == name).then(|| &rest[open + 1..close])
    })
}

fn is_launch_bounds(before: &str) -> bool {
    before.trim_end().ends_with("__launch_bounds__")
}

/// The size of one parameter, such as `const float* __restrict__ x`.
fn size_of_parameter(parameter: &str) -> Option<u64> {
    if parameter.contains(['*', '&', '[']) {
        return (!parameter.contains('&')).then_some(8);
    }
    let words: Vec<&str> = parameter.split_whitespace().filter(|word| *word != "const").collect();
    // The last word is the name, if there is a type before it.
    let (_name, ty) = words.split_last()?;
    let ty: Vec<&str> = ty.iter().copied().filter(|word| !matches!(*word, "signed" | "int") || ty.len() == 1).collect();
    match ty[..] {
        ["char" | "bool" | "int8_t" | "uint8_t"] | ["unsigned", "char"] => Some(1),
        ["short" | "half" | "__half" | "__nv_bfloat16" | "int16_t" | "uint16_t"] | ["unsigned", "short"] => Some(2),
        ["int" | "signed" | "unsigned" | "float" | "int32_t" | "uint32_t"] => Some(4),
        ["long" | "double" | "size_t" | "int64_t" | "uint64_t" | "cudaGraphConditionalHandle"]
        | ["unsigned", "long"]
        | ["long", "long"]
        | ["unsigned", "long", "long"] => Some(8),
        _ => None,
    }
}

fn without_comments(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('/') {
        text.push_str(&rest[..at]);
        let end = match rest.as_bytes().get(at + 1) {
            Some(b'/') => rest[at..].find('\n').map(|end| at + end),
            Some(b'*') => rest[at..].find("*/").map(|end| at + end + 2),
            _ => {
                text.push('/');
                Some(at + 1)
            }
        };
        let Some(end) = end else { return text };
        text.push(' ');
        rest = &rest[end..];
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(parameters: &str, sizes: Option<&[u64]>) {
        let source = format!(
            "extern \"C\" __global__ void other(int a) {{}}\nextern \"C\" __global__\nvoid k({parameters}) {{ g(1); }}"
        );
        assert_eq!(parameter_sizes(&source, "k").as_deref(), sizes, "{parameters}");
        let bounded = source.replace("__global__\nvoid k(", "__global__ void __launch_bounds__(256) k (");
        assert_eq!(parameter_sizes(&bounded, "k").as_deref(), sizes, "{bounded}");
        assert_eq!(parameter_sizes(&source, "other"), Some(vec![4]));
        assert_eq!(parameter_sizes(&source, "g"), None);
    }

    #[test]
    fn usual_parameters_have_known_sizes() {
        check("", Some(&[]));
        check("void", Some(&[]));
        check("float* x, unsigned n", Some(&[8, 4]));
        check("const float *__restrict__ x, unsigned int n, int m", Some(&[8, 4, 4]));
        check("unsigned long long n, long long m, unsigned long l, double d, float f", Some(&[8, 8, 8, 8, 4]));
        check("const unsigned char b, short s, size_t n /* last, really */, int i // not, this\n", Some(&[1, 2, 8, 4]));
        check("float4 v", None);
        check("float (&x)", None);
    }

    #[test]
    fn a_source_without_kernels_tells_nothing() {
        assert_eq!(parameter_sizes("", "k"), None);
        assert_eq!(parameter_sizes("__global__ void k(", "k"), None);
        assert_eq!(parameter_sizes("__global__", "k"), None);
    }
}
