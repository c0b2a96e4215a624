// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"unicode/utf8"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// codec is gRPC's codec for protocol buffers, with a decoder of its own for the parts of Envoy's
// messages that each request has: headers and bodies. It copies a message once, where the generated
// code copies a body twice, and makes a tenth of the allocations. Other parts, and messages in
// another form, are left to the generated code.
type codec struct{ encoding.CodecV2 }

// Unmarshal decodes a message. Its bytes are valid as long as the message.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	req, ok := v.(*extprocv3.ProcessingRequest)
	if !ok {
		return c.CodecV2.Unmarshal(data, v) //nolint:wrapcheck // gRPC expects the codec's error
	}
	text := data.Materialize()
	if decodeRequest(req, text) {
		return nil
	}
	return proto.Unmarshal(text, req) //nolint:wrapcheck // as above
}

// decodeRequest decodes a message into req, which is empty. If it returns false, the generated code
// must decode the message instead.
func decodeRequest(req *extprocv3.ProcessingRequest, text []byte) bool {
	var rest []byte // fields for the generated code
	whole := fields(text, func(field protowire.Number, value, raw []byte) bool {
		switch field {
		case 2, 3, 4, 5:
			if req.Request != nil || value == nil {
				return false // the last one would count
			}
		default:
			rest = append(rest, raw...)
			return field >= 8 && field <= 11 // metadata, attributes, mode and configuration
		}
		switch field {
		case 2:
			h := new(extprocv3.HttpHeaders)
			req.Request = &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: h}
			return decodeHeaders(h, value)
		case 3:
			h := new(extprocv3.HttpHeaders)
			req.Request = &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: h}
			return decodeHeaders(h, value)
		case 4:
			b := new(extprocv3.HttpBody)
			req.Request = &extprocv3.ProcessingRequest_RequestBody{RequestBody: b}
			return decodeBody(b, value)
		default:
			b := new(extprocv3.HttpBody)
			req.Request = &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: b}
			return decodeBody(b, value)
		}
	})
	if !whole || len(rest) > 0 && (proto.UnmarshalOptions{Merge: true}).Unmarshal(rest, req) != nil {
		proto.Reset(req)
		return false
	}
	return true
}

// fields calls take with each field of a message: its value if it is a string of bytes, else nil,
// and its whole encoding. It returns false if the message is malformed or take does.
func fields(text []byte, take func(field protowire.Number, value, raw []byte) bool) bool {
	for len(text) > 0 {
		field, kind, tag := protowire.ConsumeTag(text)
		if tag < 0 {
			return false
		}
		n := protowire.ConsumeFieldValue(field, kind, text[tag:])
		if n < 0 {
			return false
		}
		var value []byte
		if kind == protowire.BytesType {
			value, _ = protowire.ConsumeBytes(text[tag:])
		}
		if !take(field, value, text[:tag+n:tag+n]) {
			return false
		}
		text = text[tag+n:]
	}
	return true
}

func decodeHeaders(h *extprocv3.HttpHeaders, text []byte) bool {
	return fields(text, func(field protowire.Number, value, raw []byte) bool {
		if field == 1 && value != nil && h.Headers == nil {
			h.Headers = new(corev3.HeaderMap)
			return decodeHeaderMap(h.Headers, value)
		}
		return field == 3 && flag(&h.EndOfStream, raw)
	})
}

func decodeHeaderMap(m *corev3.HeaderMap, text []byte) bool {
	n := 0
	if !fields(text, func(protowire.Number, []byte, []byte) bool { n++; return true }) {
		return false
	}
	values := make([]corev3.HeaderValue, n)
	m.Headers = make([]*corev3.HeaderValue, 0, n)
	return fields(text, func(field protowire.Number, value, _ []byte) bool {
		v := &values[len(m.Headers)]
		m.Headers = append(m.Headers, v)
		return field == 1 && value != nil && fields(value, func(field protowire.Number, value, _ []byte) bool {
			switch {
			case value == nil || field < 3 && !utf8.Valid(value):
				return false
			case field == 1:
				var known bool
				if v.Key, known = usualNames[string(value)]; !known {
					v.Key = string(value)
				}
			case field == 2:
				v.Value = string(value)
			case field == 3:
				v.RawValue = value
			default:
				return false
			}
			return true
		})
	})
}

// usualNames are names of headers that need no allocation.
//
//nolint:gochecknoglobals // a table
var usualNames = func() map[string]string {
	names := make(map[string]string)
	for _, name := range []string{
		":authority", ":method", ":path", ":scheme", ":status", "accept", "accept-encoding", "content-length", "content-type", "date", "server", "transfer-encoding", "user-agent",
		"x-envoy-attempt-count", "x-envoy-expected-rq-timeout-ms", "x-envoy-external-address", "x-envoy-internal", "x-envoy-upstream-service-time", "x-forwarded-for", "x-forwarded-proto",
		"x-request-id", "traceparent", "tracestate",
	} {
		names[name] = name
	}
	return names
}()

func decodeBody(b *extprocv3.HttpBody, text []byte) bool {
	return fields(text, func(field protowire.Number, value, raw []byte) bool {
		if field == 1 {
			b.Body = value
			return value != nil
		}
		return field == 2 && flag(&b.EndOfStream, raw)
	})
}

// flag decodes a field that is a Boolean.
func flag(to *bool, raw []byte) bool {
	_, kind, n := protowire.ConsumeTag(raw)
	v, _ := protowire.ConsumeVarint(raw[n:])
	*to = protowire.DecodeBool(v)
	return kind == protowire.VarintType
}
