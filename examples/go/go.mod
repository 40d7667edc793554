module roundhouse.example/ask

go 1.19

// The versions that Debian 12 has, which the example is tested with.
require (
	github.com/golang/protobuf v1.5.2
	golang.org/x/net v0.7.0
	google.golang.org/genproto v0.0.0-20200526211855-cb27e3aa2013
	google.golang.org/grpc v1.33.3
	google.golang.org/protobuf v1.28.1
)
